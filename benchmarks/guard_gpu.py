"""BERT-Large inside 4 GB while a second process takes and returns memory at random.

    python benchmarks/guard_gpu.py --table ChnSentiCorp_htl_all.csv --vocab vocab.txt --out F.json

Two runs of one epoch (219 steps), each in a process of its own: undisturbed, and with a neighbour
that really takes GPU memory every second or so and gives it back. A large card stands in for one
of 4 GB: the cap holds the process below 4 GB, context included, and of that the watch leaves free
what the neighbour does not hold. Measured: does it finish, is it ever above the cap (a thread
looks every few milliseconds), what was adjusted, and what time was lost.

`--ways graphs` (the default), `launched`, which takes several minutes, or both.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _machine import stamp
from bert_large import BATCH, collate, made, make_model, rows_of

CAP_BYTES = 4_000_000_000
MOST_TAKEN_BYTES = 900_000_000
"""The neighbour leaves 3.1 GB: less than that BERT-Large's five bytes a parameter do not like."""
WAYS: dict[str, dict[str, Any]] = {
    "launched": {
        "max_grad_norm": 1.0,
        "strategies": [
            "Packing()", "FusedLayers()", "Checkpointing(12)", "LowBitAdamW()",
            "GradientRelease('kept8')",
        ],
    },
    "graphs": {
        "max_grad_norm": 1.0,
        "strategies": [
            "Packing()", "FusedLayers()", "Checkpointing(16)", "LowBitAdamW()",
            "GradientRelease('kept8')", "CudaGraphs()",
        ],
    },
}  # fmt: skip


def neighbour(held: Any, ready: Any, stop: Any, seed: int) -> None:
    """Takes and returns real memory; what it holds is told before it takes it."""
    import torch

    torch.zeros(1, device="cuda")
    ready.set()
    chance = random.Random(seed)
    block = None
    while not stop.wait(chance.uniform(0.3, 1.5)):
        block = None
        torch.cuda.empty_cache()
        size = int(chance.choice([0.0, chance.random(), 1.0]) * MOST_TAKEN_BYTES)
        held.value = size
        if size:
            block = torch.empty(size, dtype=torch.uint8, device="cuda")
    del block
    held.value = 0


class Meter:
    """The most this process held, looked at every few milliseconds."""

    def __init__(self, context_bytes: int, limit: Any) -> None:
        self.highest_bytes = 0
        self.samples = 0
        self._context_bytes = context_bytes
        self._limit = limit
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        import torch

        while not self._stop.wait(0.003):
            now = torch.cuda.memory_reserved() + self._context_bytes
            self.highest_bytes = max(self.highest_bytes, now)
            self.samples += 1

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def measure(way: str, table: Path, vocab: Path, *, disturbed: bool) -> dict[str, Any]:
    """One epoch, in this process."""
    import torch
    import transformers

    from memfit import BudgetTrainer
    from memfit.engine.micro_batches import MicroBatching
    from memfit.memory.available import MemoryReading
    from memfit.training.limits import CudaCap

    rows = rows_of(table, vocab)
    steps = -(-len(rows) // BATCH)
    run = WAYS[way]
    spawn = multiprocessing.get_context("spawn")
    held, ready, stop = spawn.Value("q", 0), spawn.Event(), spawn.Event()
    other = spawn.Process(target=neighbour, args=(held, ready, stop, 7))
    if disturbed:
        other.start()
    args = transformers.TrainingArguments(
        "/tmp/guard", per_device_train_batch_size=BATCH, max_steps=steps, learning_rate=2e-5,
        weight_decay=0.01, report_to="none", save_strategy="no", logging_steps=1000,
        disable_tqdm=True, seed=0, max_grad_norm=run["max_grad_norm"],
    )  # fmt: skip
    trainer: Any = BudgetTrainer(
        make_model("bert"), args, train_dataset=rows, data_collator=collate,
        strategies=[made(text) for text in run["strategies"]], budget=str(CAP_BYTES),
        micro_batching=MicroBatching(),
    )  # fmt: skip
    if disturbed:
        ready.wait(60)
    cap = trainer.guard.budget_cap = CudaCap(trainer.guard.reader())
    context = cap.read.context_bytes

    def read() -> MemoryReading:
        """A card of 4 GB, of which the neighbour holds a part."""
        own = torch.cuda.memory_reserved() + context
        return MemoryReading(CAP_BYTES, CAP_BYTES - own - held.value + 2**26, own)

    read.context_bytes = context  # type: ignore[attr-defined]
    cap.read = read  # type: ignore[assignment]
    clock = Clock(trainer)
    trainer.add_callback(clock.callback())
    with Meter(context, trainer) as meter:
        output = trainer.train()
    stop.set()
    if disturbed:
        other.join()
    return {
        "way": way, "disturbed": disturbed, "steps": trainer.state.global_step,
        "train_seconds": clock.seconds, "median_step_seconds": clock.median(),
        "slowest_step_seconds": max(clock.steps),
        "rehearsal_seconds": clock.before_first, "train_loss": output.training_loss,
        "cap_bytes": CAP_BYTES, "highest_bytes": meter.highest_bytes, "samples": meter.samples,
        "above_cap": meter.highest_bytes > CAP_BYTES,
        "adjustments": [str(one) for one in trainer.guard.adjustments.made],
        "num_ooms": torch.cuda.memory_stats().get("num_ooms", 0),
        "micro_batches_of_the_largest": [*trainer.guard.rehearsal.worst_lengths][:3],
    }  # fmt: skip


class Clock:
    """Seconds of every step; the device is waited for at its end."""

    def __init__(self, trainer: Any) -> None:
        self.steps: list[float] = []
        self.before_first = 0.0
        self._trainer = trainer
        self._began = time.perf_counter()
        self._last: float | None = None

    @property
    def seconds(self) -> float:
        return sum(self.steps)

    def median(self) -> float:
        return sorted(self.steps)[len(self.steps) // 2]

    def callback(self) -> Any:
        import torch
        from transformers import TrainerCallback

        clock = self

        class Note(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                torch.cuda.synchronize()
                clock._last = time.perf_counter()
                clock.before_first = clock._last - clock._began

            def on_step_end(self, *_: Any, **__: Any) -> None:
                torch.cuda.synchronize()
                now = time.perf_counter()
                assert clock._last is not None
                clock.steps.append(now - clock._last)
                clock._last = now

        return Note()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--vocab", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("guard_gpu.json"))
    parser.add_argument("--ways", nargs="*", default=["graphs"], choices=list(WAYS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        way, disturbed = options.one.split(":")
        found = measure(way, options.table, options.vocab, disturbed=disturbed == "True")
        print("RESULT " + json.dumps(found))
        return
    result: dict[str, Any] = {"machine": stamp(), "runs": []}
    for way in options.ways:
        for disturbed in (False, True):
            result["runs"].append(_in_a_process(options, way, disturbed=disturbed))
            options.out.write_text(json.dumps(result, indent=1))
        pair = [run for run in result["runs"] if run.get("way") == way and "steps" in run]
        if len(pair) == 2:
            lost = pair[1]["train_seconds"] - pair[0]["train_seconds"]
            result.setdefault("time_lost_seconds", {})[way] = lost
            print(f"{way}: {lost:.1f} s lost of {pair[0]['train_seconds']:.1f} s")
    options.out.write_text(json.dumps(result, indent=1))


def _in_a_process(options: Any, way: str, *, disturbed: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", f"{way}:{disturbed}"]
    command += ["--table", str(options.table), "--vocab", str(options.vocab)]
    process = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        print(f"{way}, disturbed {disturbed}: FAILED\n{process.stderr[-3000:]}", flush=True)
        return {"way": way, "disturbed": disturbed, "error": process.stderr[-3000:]}
    run: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    print(
        f"{way}, disturbed {disturbed}: {run['steps']} steps in {run['train_seconds']:.1f} s, "
        f"at most {run['highest_bytes'] / 1e9:.3f} GB, {len(run['adjustments'])} adjustments, "
        f"{run['num_ooms']} times out of memory",
        flush=True,
    )
    return run


if __name__ == "__main__":
    main()
