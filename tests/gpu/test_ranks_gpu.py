"""Two ranks that share one card, over gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAM = Path(__file__).parents[1] / "ranks_program.py"
WAYS = ("plain", "kept", "packed", "recomputed")


def start(ranks: int, folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(ranks):
        paths = [str(PROGRAM.parent), *sys.path]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "RANKS_ON": "cuda"}
        if ranks > 1:
            env |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        command = [sys.executable, str(PROGRAM), str(folder), *WAYS]
        started.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0] * ranks, "\n".join(said)[-4000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for ranks in (1, 2):
        start(ranks, folder)
    return folder


def found(folder: Path, name: str, ranks: int, rank: int = 0) -> dict[str, Any]:
    seen: dict[str, Any] = torch.load(folder / f"{name}-{ranks}-{rank}", weights_only=True)
    return seen


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_learn_as_one(runs: Path, way: str) -> None:
    alone, first, second = found(runs, way, 1), found(runs, way, 2), found(runs, way, 2, 1)
    exact = way in ("plain", "recomputed")
    for step, loss in alone["losses"].items():
        assert first["losses"][step] == pytest.approx(loss, rel=1e-4 if exact else 1e-2), step
    for name, weight in alone["weights"].items():
        shared = first["weights"][name]
        torch.testing.assert_close(shared.float(), weight.float(), rtol=0,
                                   atol=1e-4 if exact else 2e-2)  # fmt: skip
        assert torch.equal(shared, second["weights"][name]), f"{name} is not one on both ranks"
