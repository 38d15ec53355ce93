"""Every command and snippet of the README runs, in order, as a reader would run them after the installation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
# what .ci/run itself carries out, or would start this test again
ELSEWHERE = ("python3 -m venv", "pip install", "python -m pytest")


def steps() -> list[tuple[str, str]]:
    found = []
    for kind, block in BLOCKS:
        lines = [block] if kind == "python" else block.splitlines()
        found += [(kind, line) for line in lines if not line.startswith(ELSEWHERE)]
    return found


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the commands name, and `python` first on the path."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("README.md", "CHANGELOG.md"):
        shutil.copyfile(ROOT / name, folder / name)
    return folder


@pytest.mark.parametrize(("kind", "step"), steps(), ids=lambda text: text[:60].replace("\n", " "))
def test_the_readme_does_what_it_says(desk: Path, kind: str, step: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", step] if kind == "python" else ["bash", "-euc", step]
    done = subprocess.run(command, cwd=desk, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{step}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.stdout.strip()


def test_the_installation_commands_are_the_ones_ci_runs() -> None:
    second = [block for kind, block in BLOCKS if kind == "sh"][1].splitlines()
    assert [line.split()[0] for line in second] == ["python3", "pip", "python"]
    assert second[-1].startswith("python -m pytest ")
    assert "block == 2" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
