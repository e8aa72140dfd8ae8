"""A command at a terminal: prompts are waited for and answered."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from collections.abc import Mapping, Sequence

SECONDS = 120


def at_a_terminal(
    command: Sequence[str], answers: Sequence[tuple[str, str]], env: Mapping[str, str]
) -> tuple[int, str]:
    """Runs it, gives each answer once its prompt has been shown; returns exit code and screen."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
    )
    os.close(theirs)
    screen, seen = "", 0
    deadline = time.monotonic() + SECONDS
    waiting = list(answers)
    try:
        while time.monotonic() < deadline:
            if waiting and waiting[0][0] in screen[seen:]:
                seen = len(screen)
                time.sleep(0.2)  # a password prompt throws away what was typed before it
                os.write(ours, f"{waiting.pop(0)[1]}\n".encode())
            if not select.select([ours], [], [], 0.1)[0]:
                continue
            try:
                read = os.read(ours, 4096)
            except OSError:  # the other side is closed
                break
            screen += read.decode(errors="replace")
        return process.wait(timeout=SECONDS), screen
    finally:
        process.kill()
        process.wait()
        os.close(ours)
