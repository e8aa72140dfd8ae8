"""The same cases on several ranks, against one process of the stock Trainer with the whole batch.

Ranks are slow to start, so those of one start run many cases. Each rank writes what it has seen;
the process that started them runs the stock Trainer and compares.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from differential.cases import Case, drawn
from differential.comparing import _compared, _few_collections, _said
from differential.training import Seen, Training
from memfit import BudgetTrainer

TESTS = Path(__file__).resolve().parents[1]


def shared(case: Case, ranks: int) -> Case:
    """The case with an effective batch that so many ranks can have the same number of rows of.

    Out of memory, several ranks end: tests/unit/test_ranks.py. For an evaluation accelerate fills
    up the last batch, and makes other batches of a stream, which pads them to other widths: what
    sees padding gets the same width everywhere.
    """
    if case.loss == "body":  # calls a part of the model, which DDP around the whole does not see
        case = dataclasses.replace(case, loss="model")
    sees_padding = case.collator == "maskless" or case.head != "own"
    if case.evaluate and (case.data == "iterable" or sees_padding):
        case = dataclasses.replace(case, collator="max_length")
    rows = -(-case.effective // ranks) * ranks
    trial = -(-case.trial // ranks) * ranks
    return dataclasses.replace(case, batch=rows, accumulation=1, trial=trial, failing=())


def run(seeds: Sequence[int], ranks: int, folder: Path) -> None:
    """Has the ranks run the cases of these seeds; what each has seen is under `folder`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={ranks}", "-m", "differential.several_ranks"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
           "OMP_NUM_THREADS": "1"}  # fmt: skip
    left = list(seeds)
    while left:
        given = [*command, str(folder), *map(str, left)]
        done = subprocess.run(given, env=env, capture_output=True, text=True)
        now = [seed for seed in left if not any(folder.glob(f"{seed}-*"))]
        if done.returncode and len(now) == len(left):
            raise RuntimeError(f"ranks ended with {done.returncode}:\n{done.stderr[-4000:]}")
        left = now if done.returncode else []  # a case that fails ends its ranks


def differences(seed: int, ranks: int, folder: Path) -> list[str]:
    """What one process with the whole batch, by the stock Trainer, does otherwise."""
    case = shared(drawn(seed), ranks)
    files = [folder / f"{seed}-{rank}" for rank in range(ranks)]
    seen = [pickle.loads(one.read_bytes()) if one.is_file() else "ended" for one in files]
    failed = [f"rank {rank} fails: {one}" for rank, one in enumerate(seen) if isinstance(one, str)]
    if failed:
        return failed
    with _few_collections():
        place = Path(tempfile.mkdtemp(prefix="differential-"))
        try:
            stock = Training(case, transformers.Trainer, place, seen[0]).run()
        finally:
            shutil.rmtree(place, ignore_errors=True)
    found = []
    for rank, ours in enumerate(seen):
        ours.state["train_batch_size"] *= ranks
        # The first rank writes the files; another may look before they are there.
        ours.files = frozenset(_as_alone(name) for name in seen[0].files)
        found += [f"rank {rank}: {one}" for one in _compared(case, ours, stock)]
        apart = [name for name, value in ours.weights.items()
                 if not torch.equal(value, seen[0].weights[name])]  # fmt: skip
        found += [f"rank {rank}: {apart} are not those of rank 0"] if apart else []
    return found


def _as_alone(name: str) -> str:
    """Every rank keeps its random state in a file of its own."""
    return (
        "rng_state.pth".join(name.rsplit("rng_state_0.pth", 1))
        if "rng_state_0" in name
        else (str(Path(name).parent / "rng_state.pth") if "rng_state_" in name else name)
    )


def _work(folder: Path, seeds: Sequence[int]) -> None:
    """One rank's part."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for seed in seeds:
        case = shared(drawn(seed), ranks)
        case = dataclasses.replace(case, batch=case.batch // ranks, trial=case.trial // ranks)
        seen: Seen | str
        try:
            with _few_collections():
                seen = Training(case, BudgetTrainer, folder / f"run-{seed}", None).run()
        except Exception as error:
            traceback.print_exc()
            seen = _said(error)
        (folder / f"{seed}-{rank}").write_bytes(pickle.dumps(seen))
        if isinstance(seen, str):
            os._exit(1)  # the others may wait for this one
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder / f"run-{seed}", ignore_errors=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _work(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]])
