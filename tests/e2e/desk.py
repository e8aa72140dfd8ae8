"""Commands of a person who has an account at a hub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class Desk:
    """A person with a home folder, whose commands reach the local hub."""

    def __init__(self, hub: Any, home: Path, token: str) -> None:
        home.mkdir()
        self.hub, self.home, self._token = hub, home, token
        self.said = ""

    def environment(self, token: str | None, **more: str) -> dict[str, str]:
        plain = {key: value for key, value in os.environ.items() if "TOKEN" not in key}
        return {**plain, **self.hub.environment(self.home, token), **more}

    def run(
        self, *words: str, token: str | None, given: str = "", code: int = 0, **more: str
    ) -> str:
        done = subprocess.run(
            [sys.executable, *words], input=given, capture_output=True, text=True, timeout=120,
            cwd=self.home, env=self.environment(token, **more),
        )  # fmt: skip
        self.said += done.stdout + done.stderr
        assert done.returncode == code, done.stderr
        return (done.stdout if code == 0 else done.stderr).strip()

    def __call__(self, *words: str, **more: Any) -> str:
        """A command of memfit, logged in unless another token is given."""
        return self.run("-m", "memfit", *words, **{"token": self._token, **more})

    def python(self, text: str, token: str | None = None, **more: Any) -> str:
        return self.run("-c", text, token=token, **more)
