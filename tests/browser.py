"""A headless Chromium for tests of pages: found or fetched from Debian, and driven through the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import platform
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import debian

from plugins.cache import cache_folder

NAMES = (
    "chromium-headless-shell",
    "chrome-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome-stable",
    "google-chrome",
)
PACKAGE = "chromium-headless-shell"  # of Debian 12 and later: 96 MB with the libraries that a bare machine lacks
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


class NoBrowser(Exception):
    """None is installed and none could be fetched; the message says why."""


def find() -> tuple[str, dict[str, str]]:
    """A browser's path and the environment it needs: KVPACK_BROWSER, one on PATH, one in the cache, else Debian's."""
    named = os.environ.get("KVPACK_BROWSER")
    path = named or next(filter(None, map(shutil.which, NAMES)), None)
    if path:
        return path, dict(os.environ)
    root = cache_folder() / "browser"
    if not root.is_dir():
        try:
            debian.unpack(PACKAGE, root, "usr/lib/chromium/chromium-headless-shell")
        except debian.Unavailable as error:
            raise NoBrowser(f"no Chromium on PATH or in KVPACK_BROWSER, and {error}") from error
    libraries = [root / "usr/lib" / f"{platform.machine()}-linux-gnu" / part for part in ("", "pulseaudio")]
    paths = ":".join([*map(str, libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    return str(root / "usr/lib/chromium/chromium-headless-shell"), {**os.environ, "LD_LIBRARY_PATH": paths}


class Page:
    """One tab. messages: what it wrote to its console or log; requests: the addresses it asked for."""

    def __init__(self, send: Callable[[bytes], None], read: Callable[[float], bytes]) -> None:
        self._send, self._read, self._number, self._session = send, read, 0, ""
        self._events: list[Mapping[str, Any]] = []
        self.messages: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        self._send(json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._read(60))
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def open(self, url: str, width: int, dark: bool = False) -> None:
        """Load `url` in a window of `width` pixels; returns when all of it is there."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self.call("Page.navigate", url=url)
        until = time.monotonic() + 60
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._note(json.loads(self._read(until - time.monotonic())))

    def value(self, script: str) -> Any:
        """What a JavaScript expression gives, as JSON."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def screenshot(self, whole: bool = True) -> bytes:
        """A PNG of the whole page, or of what the window shows."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def _note(self, event: Mapping[str, Any]) -> None:
        self._events.append(event)
        method, about = event.get("method"), event.get("params") or {}
        if method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.messages.append(json.dumps(about)[:500])


@contextmanager
def opened() -> Iterator[Page]:
    """A page in a browser of its own, which ends with the block. Raises NoBrowser."""
    path, environment = find()
    to_browser, ours_out = os.pipe()
    ours_in, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # the protocol speaks through file descriptors 3 and 4
        shell = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$0" "$@"'
        command = ["bash", "-c", shell, path, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        buffer = bytearray()

        def read(seconds: float) -> bytes:
            until = time.monotonic() + seconds
            while b"\0" not in buffer:
                ready, _, _ = select.select([ours_in], [], [], max(0.0, until - time.monotonic()))
                part = os.read(ours_in, 1 << 16) if ready else b""
                if not part:
                    raise TimeoutError("the browser says nothing" if not ready else "the browser ended")
                buffer.extend(part)
            message, _, rest = bytes(buffer).partition(b"\0")
            buffer[:] = rest
            return message

        def send(data: bytes) -> None:
            while data:
                data = data[os.write(ours_out, data) :]

        try:
            yield Page(send, read)
        finally:
            os.close(ours_out)
            os.close(ours_in)
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
