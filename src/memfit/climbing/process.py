"""A rung's process: started, waited for, stopped; and the result it leaves, or is found to have."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from memfit.climbing.values import DOES_NOT_FIT, FAILED, OK
from memfit.config import RunConfig
from memfit.errors import OutputError
from memfit.files import read_json, write_json
from memfit.messages import ENVIRONMENT, language, t

_KILLED = -9
_STOP_SECONDS = 10


def inputs(config: RunConfig) -> list[Any]:
    """Files that are read: a table or a model changed in place is another one."""
    paths = [Path(one) for one in (config.data.path, config.data.validation_file or "") if one]
    model = Path(config.model.model)
    paths += sorted(model.iterdir()) if model.is_dir() else []
    stats = [(one.name, one.stat()) for one in paths if one.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def kept(path: Path) -> dict[str, Any] | None:
    """A result that need not be made again; what failed may work now."""
    if not path.is_file():
        return None
    with contextlib.suppress(OutputError):
        found = read_json(path)
        return found if found.get("status") in (OK, DOES_NOT_FIT) else None
    return None


def run(request: dict[str, Any], path: Path) -> dict[str, Any]:
    """One process; however it ends, there is a result."""
    asked = write_json(path.with_suffix(".request"), request)
    environment = {**os.environ, ENVIRONMENT: language()}
    # Several cards would make the stock Trainer split batches over them.
    environment.setdefault("CUDA_VISIBLE_DEVICES", "0")
    # Without -P a file in the current folder could take the place of a module.
    command = [sys.executable, "-P", "-m", "memfit.climbing.run", str(asked), str(path)]
    log = path.with_suffix(".log")
    with log.open("w", encoding="utf-8", errors="replace") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            code = process.wait()
        except BaseException:
            _stop(process)
            raise
        finally:
            asked.unlink(missing_ok=True)
    if path.is_file():
        return read_json(path)
    if code == _KILLED:
        found: dict[str, Any] = {
            "status": DOES_NOT_FIT,
            "why": t("the system ended its process, as it does where memory runs out"),
        }
    else:
        found = {
            "status": FAILED,
            "why": t("its process ended with code {code}; see {log}", code=code, log=log),
        }
    write_json(path, found)
    return found


def _stop(process: subprocess.Popen[Any]) -> None:
    """Ctrl-C reaches the process too; one that does not end is ended."""
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
