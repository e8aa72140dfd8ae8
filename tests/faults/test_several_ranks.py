"""BudgetTrainer on several ranks: one training, whatever the strategy; it survives what may happen.

tests/differential/test_several_ranks.py has the breadth: random trainings beside the stock Trainer.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.strategies.lowbit.lowbit_kernels import SMALL_NUMEL
from ranks_program import SHARDED, SLOW_SECONDS, leave

PROGRAM = Path(__file__).parents[1] / "ranks_program.py"
WAYS = (
    "plain",
    "kept",
    "kept8",
    "host",
    "release",
    "recomputed",
    "sharded",
    "divided",
    "divided_half",
)


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node")
ACCELERATE = (
    "accelerate.commands.launch", "--multi_gpu", "--main_process_port", "0", "--num_processes",
)  # fmt: skip


def train(ranks: int, folder: Path, *names: str, launcher: tuple[str, ...] = TORCHRUN) -> None:
    """Runs trainings on so many ranks, each in its own process; on one rank they run here."""
    if ranks == 1:
        leave(folder, *names)
        return
    command = [sys.executable, "-m", *launcher, str(ranks), str(PROGRAM), str(folder), *names]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def environment() -> dict[str, str]:
    paths = [str(PROGRAM.parent), *sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def found(folder: Path, name: str, ranks: int, rank: int = 0) -> dict[str, Any]:
    seen: dict[str, Any] = torch.load(folder / f"{name}-{ranks}-{rank}", weights_only=True)
    return seen


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    train(1, folder, *WAYS, "saved")
    train(2, folder, *WAYS, "saved", "measured", "timed", *(f"sharded_{way}" for way in SHARDED))
    return folder


def test_a_script_under_accelerate_launch_trains_as_under_torchrun(
    runs: Path, tmp_path: Path
) -> None:
    train(2, tmp_path, "plain", launcher=ACCELERATE)
    for rank in (0, 1):
        here, there = found(tmp_path, "plain", 2, rank), found(runs, "plain", 2, rank)
        assert here["losses"] == there["losses"]


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_learn_as_one(runs: Path, way: str) -> None:
    alone, first, second = found(runs, way, 1), found(runs, way, 2), found(runs, way, 2, 1)
    exact = way in ("plain", "recomputed", "sharded", "divided")
    assert alone["losses"].keys() == first["losses"].keys()
    for step, loss in alone["losses"].items():
        assert first["losses"][step] == pytest.approx(loss, rel=1e-5 if exact else 5e-3), step
        assert second["losses"][step] == first["losses"][step]
    for name, weight in alone["weights"].items():
        shared = first["weights"][name]
        torch.testing.assert_close(
            shared, weight, rtol=0, atol=5e-6 if exact else 2e-2, check_dtype=False
        )
        assert torch.equal(shared, second["weights"][name]), f"{name} is not one on both ranks"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_peak_of_a_rank_is_predicted(runs: Path, rank: int) -> None:
    """With what it sends to the others, which shows in the peak of the first two."""
    for way, (measured, predicted, alone) in found(runs, "measured", 2, rank).items():
        assert predicted == pytest.approx(measured, rel=0.01), way
        assert way not in ("plain", "kept8") or measured > 1.1 * alone, way


@pytest.mark.parametrize("rank", [0, 1])
def test_the_time_said_has_the_exchange_in_it(runs: Path, rank: int) -> None:
    """Of gradients before the update, and of weights after it."""
    seen = found(runs, "timed", 2, rank)
    sent_seconds = 2 * seen["messages"] * SLOW_SECONDS
    for step_seconds, exchange_seconds in (seen["found"], seen["again"]):
        assert sent_seconds < exchange_seconds < sent_seconds + 5
        assert step_seconds > exchange_seconds
    assert seen["said"] == seen["found"][0]
    assert seen["again"][0] == pytest.approx(0.5 + seen["again"][1], abs=1e-5)
    assert seen["untouched"]


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_checkpoint_of_two_ranks_goes_on_with_another_number(runs: Path, ranks: int) -> None:
    names = ["resumed:2", "sharded_resumed:2", "divided_resumed:2"]
    names += ["sharded", "divided"] if ranks > 1 else []
    train(ranks, runs, *names)
    for name in names:
        before = next((way for way in ("sharded", "divided") if way in name), "saved")
        whole, rest = found(runs, before, 1), found(runs, name.replace(":", "-"), ranks)
        assert len(rest["losses"]) == len(whole["losses"])
        for step, loss in whole["losses"].items():
            assert rest["losses"][step] == pytest.approx(loss, rel=1e-5), step
        for one, weight in whole["weights"].items():
            torch.testing.assert_close(rest["weights"][one], weight, rtol=0, atol=5e-6)
    if ranks > 1:
        for resumed in ("", "_resumed-2"):
            assert_divided(runs, ranks, resumed)
            assert_all_divided(runs, ranks, resumed)


def assert_divided(runs: Path, ranks: int, resumed: str = "") -> None:
    """Every rank keeps its share of the state, and together they keep it once."""
    whole = found(runs, "sharded", 1)["state_bytes"]
    name = f"sharded{resumed}"
    each = [found(runs, name, ranks, rank)["state_bytes"] for rank in range(ranks)]
    assert all(whole.values())
    for name, size in whole.items():
        assert sorted(one[name] for one in each) == [*([0] * (ranks - 1)), size], name
    largest = max(sum(one.values()) for one in each)
    assert largest == pytest.approx(sum(whole.values()) / ranks, rel=0.02)


def assert_all_divided(runs: Path, ranks: int, resumed: str = "") -> None:
    """Every rank keeps a part of every weight and of its state, and together they keep it once."""
    for what in ("weight_bytes", "state_bytes"):
        whole = found(runs, "divided", 1)[what]
        each = [found(runs, f"divided{resumed}", ranks, rank)[what] for rank in range(ranks)]
        assert all(whole.values())
        for name, size in whole.items():
            assert sum(one[name] for one in each) == size, name
        largest = max(sum(one.values()) for one in each)
        assert largest == pytest.approx(sum(whole.values()) / ranks, rel=0.01)


def test_weights_are_divided(runs: Path) -> None:
    assert_all_divided(runs, 2)


@pytest.mark.parametrize("way", ["sharded", "divided"])
def test_the_state_is_divided(runs: Path, way: str) -> None:
    assert_divided(runs, 2)
    saved = [runs / f"of-{way}-{ranks}" / "checkpoint-6" for ranks in (1, 2)]
    alone, together = (torch.load(one / "optimizer.pt", weights_only=True) for one in saved)
    assert together["state"].keys() == alone["state"].keys()
    for index, state in alone["state"].items():
        shared = together["state"][index]["momentum_buffer"]
        torch.testing.assert_close(shared, state["momentum_buffer"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", SHARDED)
def test_low_bit_state_that_is_divided_is_the_same_bit_for_bit(runs: Path, way: str) -> None:
    each = [found(runs, way, 2), *(found(runs, f"sharded_{way}", 2, rank) for rank in (0, 1))]
    whole, first, second = each
    assert whole["losses"] == first["losses"] == second["losses"]
    for name, weight in whole["weights"].items():
        assert torch.equal(first["weights"][name], weight), name
        assert torch.equal(second["weights"][name], weight), name
    # The first rank saves the trained model, with all its bits.
    assert whole["masters"].keys() == first["masters"].keys()
    assert whole["masters"]
    for name, master in whole["masters"].items():
        assert torch.equal(first["masters"][name], master), name
    large = [name for name, one in whole["weights"].items() if one.numel() > SMALL_NUMEL]
    held = [sum(one["state_bytes"][name] for name in large) for one in each]
    assert held[0] > 0
    assert held[1] + held[2] == held[0]
    assert max(held[1:]) < 0.6 * held[0]


def test_a_checkpoint_of_divided_low_bit_state_is_the_usual_one(runs: Path) -> None:
    saved = [runs / f"of-{way}-2" / "checkpoint-6" for way in ("kept8", "sharded_kept8")]
    whole, divided = (torch.load(one / "optimizer.pt", weights_only=True) for one in saved)
    assert divided["state"].keys() == whole["state"].keys()
    for index, state in whole["state"].items():
        assert divided["state"][index].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(divided["state"][index][name], value), name


def test_a_rank_that_dies_ends_the_others_in_words(tmp_path: Path) -> None:
    """Without torchrun, which ends them by a signal before they can say anything."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        env = {**environment(), **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, str(PROGRAM), str(tmp_path), "killed"]
        ranks.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    said = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL]
    assert "another process of this training has ended" in said[0], said[0][-3000:]
    assert (tmp_path / "saved" / "checkpoint-2" / "model.safetensors").is_file()
