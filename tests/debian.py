"""Debian packages unpacked into a folder, for tests that need what pip has not: no rights needed, nothing installed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class Unavailable(Exception):
    """It could not be fetched; the message says why."""


def unpack(package: str, root: Path, holds: str, suite: str | None = None) -> None:
    """Leave `package` unpacked in the folder `root`, where it has the file `holds`.

    suite: take it alone, from that suite of the archive that this machine's apt knows; None: this machine's own, with
    all that it depends on and lacks. Raises Unavailable.
    """
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise Unavailable(f"there is no apt-get to fetch {package} with")
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        here = Path(folder)
        for name in ("lists/partial", "cache/archives/partial", "parts", "root"):
            (here / name).mkdir(parents=True)
        apt = ["apt-get", "-qq", "-o", f"Dir::State::lists={here}/lists", "-o", f"Dir::Cache={here}/cache"]
        apt += ["-o", "APT::Sandbox::User="]  # else root's apt downloads as a user who may not write here
        if suite is not None:
            (here / "suite.list").write_text(f"deb [signed-by={KEYRING}] {_mirror(here)} {suite} main\n")
            apt += ["-o", f"Dir::Etc::sourcelist={here}/suite.list", "-o", f"Dir::Etc::sourceparts={here}/parts"]
        _run([*apt, "update"], here)
        packages = [package]
        if suite is None:
            plan = _run([*apt, "--simulate", "--no-install-recommends", "install", package], here)
            packages = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
        _run([*apt, "download", *packages], here)
        for file in sorted(here.glob("*.deb")):
            _run(["dpkg", "--extract", str(file), str(here / "root")], here)
        if not (here / "root" / holds).is_file():
            raise Unavailable(f"Debian's {package} has no {holds}")
        try:
            (here / "root").rename(root)
        except OSError:  # another process was first
            if not root.is_dir():
                raise


def _mirror(here: Path) -> str:
    """Where this machine's apt takes Debian from."""
    if not Path(KEYRING).is_file():
        raise Unavailable(f"there is no {KEYRING}: this machine does not run Debian")
    targets = ("--format", "$(REPO_URI) $(ORIGIN) $(RELEASE)", "Created-By: Packages")
    known = [line.split() for line in _run(["apt-get", "indextargets", *targets], here).splitlines()]
    mirror = next((uri for uri, origin, release in known if origin == "Debian" and "-" not in release), None)
    if mirror is None:
        raise Unavailable("apt knows no archive of Debian's")
    return mirror


def _run(command: list[str], folder: Path) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} took more than 300 s") from error
    if done.returncode:
        raise Unavailable(f"{' '.join(command[:1] + command[-2:])} failed: {done.stderr.strip()[-300:]}")
    return done.stdout
