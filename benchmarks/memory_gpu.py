"""Measures the memory of the stock transformers Trainer, run by run, and writes it as JSON.

    PYTHONPATH=src python benchmarks/memory_gpu.py --out memory.json --seconds 450

Every run is three optimizer steps of an untouched `Trainer` on a model built from a config.
Runs already in the file are left out, so that a long list can be measured in parts;
`--device cpu --smoke` walks through all of it with tiny models and measures nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import gc
import importlib.util
import json
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from _history import history
from _machine import stamp
from _memory_cases import CASES, HELD_OUT, Case
from _stock_run import arguments, build_model, make_rows, make_trainer
from memfit.memory import nvml

POLL_SECONDS = 0.02


class DeviceWatch(threading.Thread):
    """Polls what nvidia-smi would show, and keeps the highest."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._stopping = threading.Event()

    def run(self) -> None:
        with nvml.open_device() as device:
            while device is not None and not self._stopping.wait(POLL_SECONDS):
                self.peak_bytes = max(self.peak_bytes, device.use().used_bytes)

    def stop(self) -> int:
        self._stopping.set()
        self.join()
        return self.peak_bytes


class StepWatch(TrainerCallback):
    """Time and memory of every step; each step's peak is read and then set back."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.before_peak_bytes = self.save_peak_bytes = self.held = 0
        self.began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self.steps:
            self.before_peak_bytes = peak("allocated_bytes")
        reset_peaks()
        self.began = time.perf_counter()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.held = torch.cuda.memory_allocated()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronize()
        self.steps.append(
            {
                "seconds": round(time.perf_counter() - self.began, 4),
                "peak_allocated_bytes": peak("allocated_bytes"),
                "peak_requested_bytes": peak("requested_bytes"),
                "with_gradients_bytes": self.held,
                "after_bytes": torch.cuda.memory_allocated(),
                "reserved_bytes": torch.cuda.memory_reserved(),
            }
        )
        reset_peaks()

    def on_save(self, *_: Any, **__: Any) -> None:
        self.save_peak_bytes = peak("allocated_bytes")


def peak(counter: str) -> int:
    """The highest value of an allocator counter since it was last set back."""
    return int(torch.cuda.memory_stats().get(f"{counter}.all.peak", 0))


def reset_peaks() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def used_bytes() -> int:
    """What the device holds, over all processes."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def clean() -> None:
    """Leaves the allocator as empty as in a new process; the context alone remains."""
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        reset_peaks()


def set_expandable(on: bool) -> None:
    """Takes effect from the next segment on; torch moved the call between 2.9 and 2.13."""
    new = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (new or torch.cuda.memory._set_allocator_settings)(f"expandable_segments:{on}")


def probe() -> dict[str, Any]:
    """The context of an empty process, and what the matrix libraries add to it."""
    found: dict[str, Any] = {}

    def note(name: str) -> None:
        synchronize()
        found[name] = {
            "allocated_bytes": torch.cuda.memory_allocated(),
            "context_bytes": used_bytes() - torch.cuda.memory_reserved(),
            "nvml": dataclasses.asdict(device.use()) if device else None,
        }

    with nvml.open_device() as device:
        found["before"] = {"nvml": dataclasses.asdict(device.use()) if device else None}
        torch.cuda.init()
        note("empty")
        for dtype in (torch.float32, torch.bfloat16):
            clean()
            name = str(dtype).removeprefix("torch.")
            weight = torch.ones(256, 256, device="cuda", dtype=dtype, requires_grad=True)
            bias = torch.ones(256, device="cuda", dtype=dtype, requires_grad=True)
            note(f"{name}_tensors")
            with torch.no_grad():
                torch.mm(weight, weight)
            note(f"{name}_matmul")
            out = torch.nn.functional.linear(weight, weight, bias)
            note(f"{name}_linear_with_bias")
            out.sum().backward()  # another thread, which has a cuBLAS handle of its own
            note(f"{name}_backward")
            del out, weight, bias
            gc.collect()
            note(f"{name}_left")
            torch._C._cuda_clearCublasWorkspaces()
            note(f"{name}_cleared")
    return found


def measure(case: Case, *, tiny: bool) -> dict[str, Any]:
    """One run: the allocator's counters, the device's, and the time."""
    cuda = torch.cuda.is_available()
    clean()
    if cuda:
        set_expandable(case.expandable_segments)
    model = build_model(case, device="cuda" if cuda else "cpu", tiny=tiny)
    rows = make_rows(case, model.config)
    clean()
    watch, device = StepWatch(), DeviceWatch()
    seen: list[list[int]] = []
    if case.history and cuda:
        torch.cuda.memory._record_memory_history(context=None, max_entries=10**7)
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(case, folder, cpu=not cuda)
        trainer = make_trainer(case, model, rows, args, watch, seen)
        found = sizes(model)
        device.start()
        try:
            trainer.train()
            synchronize()
        finally:
            found["nvml_peak_bytes"] = device.stop()
        if case.history and cuda:
            found["history"] = history()
            torch.cuda.memory._record_memory_history(None)
        found |= counters(watch) | {"micro_batches": list(seen)}
        if case.phases:
            model = None  # the trainer's alone, so that it can let go of it
            found["phases"] = phases(case, trainer, watch, folder)
    del trainer, model
    gc.collect()
    found["left_bytes"] = torch.cuda.memory_allocated()
    return found


def sizes(model: Any) -> dict[str, Any]:
    """What the model alone takes, once the Trainer has moved it."""
    parameters = list(model.parameters())
    return {
        "parameters": sum(p.numel() for p in parameters),
        "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "model_bytes": torch.cuda.memory_allocated(),
        "attn_implementation": model.config._attn_implementation,
    }


def counters(watch: StepWatch) -> dict[str, Any]:
    """The peaks over all steps; the device never gives reserved memory back during a run."""
    steps = watch.steps
    reserved = torch.cuda.memory_reserved()
    stats = torch.cuda.memory_stats()
    keys = ("reserved_bytes.small_pool.current", "reserved_bytes.large_pool.current",
            "segment.small_pool.current", "segment.large_pool.current",
            "num_alloc_retries", "num_device_alloc", "num_device_free")  # fmt: skip
    return {
        "max_memory_allocated": max(
            [step["peak_allocated_bytes"] for step in steps] + [watch.before_peak_bytes]
        ),
        "max_memory_reserved": max([step["reserved_bytes"] for step in steps] + [reserved]),
        "device_used_bytes": used_bytes(),
        "context_bytes": used_bytes() - reserved,
        "allocator": {key: stats.get(key, 0) for key in keys},
        "steps": steps,
    }


def phases(case: Case, trainer: Any, watch: StepWatch, folder: str) -> dict[str, Any]:
    """The peaks of evaluating, of saving a checkpoint, and of resuming from it."""
    found = {"save_peak_bytes": watch.save_peak_bytes}
    reset_peaks()
    trainer.evaluate()
    found["evaluate_peak_bytes"] = peak("allocated_bytes")
    config, rows = trainer.model.config, trainer.train_dataset
    model = type(trainer.model)._from_config(config).to("cpu")
    forget(trainer)
    clean()
    found["resume_start_bytes"] = torch.cuda.memory_allocated()
    again = StepWatch()
    args = arguments(case, folder, cpu=not torch.cuda.is_available(), more_steps=1)
    resumed = make_trainer(case, model, rows, args, again, [])
    reset_peaks()
    resumed.train(resume_from_checkpoint=str(Path(folder) / f"checkpoint-{case.steps}"))
    found["resume_load_peak_bytes"] = again.before_peak_bytes
    found["resume_step_peak_bytes"] = again.steps[0]["peak_allocated_bytes"]
    found["resume_reserved_bytes"] = torch.cuda.memory_reserved()
    return found


def forget(trainer: Any) -> None:
    """Lets go of all a Trainer holds on the device; the schedule holds the optimizer too."""
    trainer.accelerator.free_memory()
    trainer.model = trainer.model_wrapped = trainer.optimizer = trainer.lr_scheduler = None
    handler = trainer.callback_handler
    handler.model = handler.optimizer = handler.lr_scheduler = None


def chosen(patterns: list[str]) -> list[Case]:
    """The cases whose id matches one of the patterns; all without a pattern."""
    ids = [case.id for case in (*CASES, *HELD_OUT)]
    if len(set(ids)) != len(ids):
        raise SystemExit(f"two cases share an id: {sorted(i for i in ids if ids.count(i) > 1)}")
    if "held-out" in patterns:
        cases = HELD_OUT
    else:
        chosen = [c for c in CASES if any(fnmatch.fnmatch(c.id, p) for p in patterns)]
        cases = chosen if patterns else CASES
    missing = [c for c in cases if c.requires and not importlib.util.find_spec(c.requires)]
    for case in missing:
        print(f"{case.id}: left out, {case.requires} is not installed", file=sys.stderr)
    return [case for case in cases if case not in missing]


def attempt(case: Case, *, tiny: bool) -> dict[str, Any]:
    """One run as a record; what fails is written down and does not end the others."""
    began = time.perf_counter()
    record: dict[str, Any] = {"case": case.describe(), "row_lengths": case.row_lengths()}
    try:
        record["measured"] = measure(case, tiny=tiny)
    except Exception as error:
        traceback.print_exc()
        record["error"] = f"{type(error).__name__}: {error}"[:2000]
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(None)
    record["seconds"] = round(time.perf_counter() - began, 2)
    return record


def load(path: Path) -> dict[str, Any]:
    """What an earlier part of the same measurement wrote, if it ran on the same versions."""
    here = stamp()
    if not path.is_file():
        return {"machine": here, "runs": []}
    before = json.loads(path.read_text())
    for key in ("versions", "gpu"):
        if before["machine"][key] != here[key]:
            raise SystemExit(f"{path} was measured with another {key}: {before['machine'][key]}")
    before["runs"] = [run for run in before["runs"] if "measured" in run]
    return before


def write(path: Path, result: dict[str, Any]) -> None:
    """One line a run; the long histories go into a file of their own."""
    histories = path.with_suffix(".history.json")
    known = json.loads(histories.read_text()) if histories.is_file() else {}
    for run in result["runs"]:
        if packed := run.get("measured", {}).pop("history", None):
            known[run["case"]["id"]] = packed
    histories.write_text(json.dumps(known, indent=1) + "\n")
    lines = ",\n".join(json.dumps(run) for run in result["runs"])
    head = {key: value for key, value in result.items() if key != "runs"}
    path.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "runs": [\n{lines}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("memory_gpu.json"))
    parser.add_argument("--only", nargs="*", default=[], help="ids, patterns, or held-out")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--history", action="store_true", help="record every allocation of all")
    parser.add_argument("--list", action="store_true", help="print the ids and stop")
    args = parser.parse_args()
    began = time.perf_counter()
    cases = chosen(args.only)
    if args.list:
        print("\n".join(case.id for case in cases))
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here; --device cpu --smoke tries the script without one")
    # Before anything else touches the device: an empty process has no kernels loaded yet.
    found_probe = probe() if args.device == "cuda" else {}
    result = load(args.out)
    result.setdefault("probes", []).append(found_probe)
    done = {run["case"]["id"] for run in result["runs"]}
    for case in cases:
        if case.id in done:
            continue
        if time.perf_counter() - began > args.seconds:
            print(f"stopped after {args.seconds:.0f} s; the same command goes on", flush=True)
            break
        if args.history:
            case = dataclasses.replace(case, history=True)
        record = attempt(case, tiny=args.smoke)
        result["runs"].append(record)
        write(args.out, result)
        print(summary(record), flush=True)


def summary(record: dict[str, Any]) -> str:
    """One line for the terminal."""
    if "error" in record:
        return f"{record['case']['id']}: FAILED {record['error'][:200]}"
    found = record["measured"]
    gib = [found[k] / 2**30 for k in ("max_memory_allocated", "max_memory_reserved")]
    return (
        f"{record['case']['id']}: allocated {gib[0]:.3f} GiB, reserved {gib[1]:.3f} GiB, "
        f"context {found['context_bytes'] / 2**20:.0f} MiB, workspaces "
        f"{found['left_bytes'] / 2**20:.1f} MiB, {record['seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()
