"""A real browser for tests: Chromium without a window, spoken to through a pair of pipes.

The DevTools protocol over `--remote-debugging-pipe`: JSON messages that end with a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE_SECONDS = 120.0
# The browser wants its pipes to be descriptors 3 and 4, whatever they are here.
_WITH_PIPES = (
    "import os, sys; pipes = [os.dup(os.dup(int(one))) for one in sys.argv[1:3]];"
    "[os.dup2(one, number) for number, one in enumerate(pipes, 3)];"
    "os.execv(sys.argv[3], sys.argv[3:])"
)


def find() -> str | None:
    """The browser of this machine."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One tab; `messages` collects what the page says to its console and what goes wrong."""

    def __init__(self, profile: Path) -> None:
        executable = find()
        assert executable is not None
        read_here, write_there = os.pipe()
        read_there, write_here = os.pipe()
        launcher = [sys.executable, "-c", _WITH_PIPES, str(read_there), str(write_there)]
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-background-networking", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [*launcher, executable, *flags],
            pass_fds=(read_there, write_there),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        self._read, self._write = read_here, write_here
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.messages: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility", "Network"):
            self.call(f"{domain}.enable")

    # ---- the protocol ----

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], PATIENCE_SECONDS)
            assert ready, "the browser does not answer"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "the browser has gone"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled":
            self.messages.append(" ".join(str(one.get("value")) for one in params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.messages.append(params["exceptionDetails"]["text"])
        elif method == "Log.entryAdded":
            self.messages.append(params["entry"]["text"])
        elif method == "Page.loadEventFired":
            self._loaded = True

    # ---- what tests do ----

    def look_like(
        self, width: int, height: int, *, dark: bool = False, on_paper: bool = False
    ) -> None:
        """A window of that size, by day or by night, on a screen or on paper."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call(
            "Emulation.setEmulatedMedia", media="print" if on_paper else "screen", features=[scheme]
        )

    def open(self, url: str) -> None:
        """Loads a page."""
        self._loaded = False
        self.messages.clear()
        self.call("Page.navigate", url=url)
        while not self._loaded:
            self._receive()

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.run(script):
            assert time.monotonic() < deadline, f"never: {script}"
            time.sleep(0.1)

    def press(self, key: str, **more: Any) -> None:
        """A key, down and up."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **more)

    def screenshot(self, path: Path) -> Path:
        """The whole page, also what one would have to scroll to."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def close(self) -> None:
        """Ends the browser."""
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(20)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
