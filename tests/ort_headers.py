"""ONNX Runtime's C headers, which no package of pip's has: found on the machine, or fetched from Debian's archive."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from plugins.cache import cache_folder
from plugins.native.build import find_onnxruntime

SUITE, PACKAGE = "trixie", "libonnxruntime-dev"  # 85 KB; Debian 12 has none
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class NoHeaders(Exception):
    """There are none and none could be fetched; the message says why."""


def find() -> Path:
    """The folder of onnxruntime_c_api.h. Raises NoHeaders."""
    installed = find_onnxruntime()
    if installed is not None:
        return installed
    root = cache_folder() / "onnxruntime-headers"
    if not root.is_dir():
        _fetch(root)
    return root / "usr/include/onnxruntime"


def _fetch(root: Path) -> None:
    """Unpack the package into `root`, with apt's lists in a folder of their own: no rights needed."""
    if not (shutil.which("apt-get") and shutil.which("dpkg") and Path(KEYRING).is_file()):
        raise NoHeaders("no headers of ONNX Runtime, and no apt-get to fetch them with")
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        here = Path(folder)
        for name in ("lists/partial", "cache/archives/partial", "parts", "root"):
            (here / name).mkdir(parents=True)
        targets = ("--format", "$(REPO_URI) $(ORIGIN) $(RELEASE)", "Created-By: Packages")
        known = [line.split() for line in _run(["apt-get", "indextargets", *targets], here).splitlines()]
        mirror = next((uri for uri, origin, release in known if origin == "Debian" and "-" not in release), None)
        if mirror is None:
            raise NoHeaders("no headers of ONNX Runtime, and apt knows no archive of Debian's")
        (here / "suite.list").write_text(f"deb [signed-by={KEYRING}] {mirror} {SUITE} main\n")
        apt = ["apt-get", "-qq", "-o", f"Dir::Etc::sourcelist={here}/suite.list", "-o", "APT::Sandbox::User="]
        apt += ["-o", f"Dir::Etc::sourceparts={here}/parts", "-o", f"Dir::State::lists={here}/lists"]
        apt += ["-o", f"Dir::Cache={here}/cache"]
        _run([*apt, "update"], here)
        _run([*apt, "download", PACKAGE], here)
        for file in here.glob("*.deb"):
            _run(["dpkg", "--extract", str(file), str(here / "root")], here)
        if not (here / "root/usr/include/onnxruntime/onnxruntime_c_api.h").is_file():
            raise NoHeaders(f"Debian's {PACKAGE} has no headers where they used to be")
        try:
            (here / "root").rename(root)
        except OSError:  # another process was first
            if not root.is_dir():
                raise


def _run(command: list[str], folder: Path) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired as error:
        raise NoHeaders(f"{command[0]} took more than 300 s") from error
    if done.returncode:
        raise NoHeaders(f"{' '.join(command[:2])} failed: {done.stderr.strip()[-300:]}")
    return done.stdout
