"""The planner's memory beside what runs of memfit's own strategies took: how far off it is.

    python benchmarks/plan_accuracy.py --table ChnSentiCorp_htl_all.csv --vocab vocab.txt
    python benchmarks/plan_accuracy.py --table … --vocab … --only '*graphs*' results/other.json

Needs no GPU. Reads what bert_large.py and step_time.py measured. A plan covers the largest batch
the shuffle can draw, and BudgetTrainer with a budget begins with it. These runs had no budget: they
saw only the batches they drew, in that order, and the allocator kept what each new largest one
left behind. So the batches are drawn again here, and what is predicted is that run. Graphs take
the largest batch there can be before they see it; `--graphs-seen` is for files measured before
they did.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bert_large import BATCH, CONFIG, XLMR, collate, made, rows_of
from step_time import SHAPES

RESULTS = Path(__file__).resolve().parent / "results"
MEASURED = (RESULTS / "bert_large_h200.json", RESULTS / "step_time_h200.json")
CARD = "H200 141GB"
EPOCH_STEPS = 219


@dataclass(frozen=True)
class Measured:
    """One run: how it trained, and what it took."""

    name: str
    model: str
    shape: Mapping[str, Any]
    args: Mapping[str, Any]
    strategies: Sequence[str]
    rows: int | None
    """Of a micro-batch."""
    steps: int
    allocated_bytes: int
    device_bytes: int | None


def read(path: Path) -> Iterator[Measured]:
    """The runs of either kind of result file that strategies of memfit trained."""
    runs = json.loads(path.read_text())["runs"]
    if isinstance(runs, dict):
        yield from (_step_time(name, run) for name, run in runs.items() if "case" in run)
        return
    for run in runs:
        if "strategies" not in run.get("run", {}) or "error" in run:
            continue
        kind = run["run"].get("model", "bert")
        device = run["max_memory_reserved"] + run["context_bytes"]
        yield Measured(
            run["name"], kind, XLMR if kind == "xlmr" else CONFIG, run["run"].get("args", {}),
            run["run"]["strategies"], None, run["steps"], run["max_memory_allocated"], device,
        )  # fmt: skip


def _step_time(name: str, run: Mapping[str, Any]) -> Measured:
    case = run["case"]
    shape = {"vocab_size": 21128, "num_labels": 2, **SHAPES[case["shape"]]}
    args = {"bf16": True} if case.get("bf16") else {}
    return Measured(
        name, "bert", shape, args, case.get("strategies", []), case.get("rows"),
        case.get("steps", 48), run["max_memory_allocated"], None,
    )  # fmt: skip


def drawn_tokens(rows: list[dict[str, Any]], folder: str) -> list[int]:
    """Tokens of each batch of an epoch, drawn by the Trainer as the runs drew them."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    trainer = transformers.Trainer(
        model=transformers.BertForSequenceClassification(config),
        args=arguments(folder, {"max_steps": EPOCH_STEPS}),
        train_dataset=rows,
        data_collator=collate,
    )
    return [int(batch["attention_mask"].sum()) for batch in trainer.get_train_dataloader()]


def arguments(folder: str, more: Mapping[str, Any]) -> Any:
    """As the runs were given them, on whatever this machine has."""
    import transformers

    return transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=BATCH, seed=0, report_to="none",
        use_cpu=True, **more,
    )  # fmt: skip


def predict(
    run: Measured, lengths: tuple[int, ...], drawn: list[int], folder: str, *, graphs_seen: bool
) -> dict[str, Any]:
    """The run's peak as a plan would have said it, and how long that took."""
    import transformers

    from memfit.engine.micro_batches import MicroBatching
    from memfit.memory.cards import find_card
    from memfit.memory.phases import TRAINING
    from memfit.planner.memory_price import phase_peaks
    from memfit.planner.price import Pricer
    from memfit.planner.task import Task
    from memfit.strategies import CudaGraphs, Packing, find

    began = time.perf_counter()
    kind = transformers.XLMRobertaConfig if run.model == "xlmr" else transformers.BertConfig
    task = Task(
        config=kind(**run.shape), lengths=lengths, args=arguments(folder, run.args),
        card=find_card(CARD),
    )  # fmt: skip
    strategies = tuple(made(text) for text in run.strategies)
    limits, pricer = MicroBatching(max_rows=run.rows), Pricer(task)
    graphed = find(strategies, CudaGraphs) is not None and not graphs_seen
    is_worst = graphed or run.rows or not find(strategies, Packing)
    if is_worst:
        found = pricer.memory(strategies, limits)
        phases, trace = found.phases, found.trace
    else:
        trace = pricer.tracer.step(strategies, limits, tokens=max(drawn[: run.steps]))
        phases = phase_peaks(pricer.priced(trace, strategies, limits), task.card)
    peak = phases[TRAINING]
    device = peak.device_bytes
    if not is_worst:
        sizes = in_order(drawn[: run.steps], find(strategies, CudaGraphs))
        device += reserved_bytes(pricer, strategies, limits, sizes) - peak.reserved_bytes
    return {
        "name": run.name, "tokens": trace.rows.tokens,
        "measured": {"allocated": run.allocated_bytes, "device": run.device_bytes},
        "predicted": {"allocated": peak.allocated_bytes, "device": device},
        "components": {str(name): size for name, size in peak.components.items()},
        "seconds": round(time.perf_counter() - began, 2),
    }  # fmt: skip


def in_order(drawn: Sequence[int], graphs: Any) -> list[int]:
    """The sizes that may make the allocator take more: each new largest, or each new graph."""
    step = graphs.bucket_tokens if graphs else 1
    sizes = [-(-tokens // step) * step for tokens in drawn]
    if graphs:  # the first is launched, then every size is captured once
        return [sizes[0], *dict.fromkeys(sizes[1:])]
    return [size for at, size in enumerate(sizes) if size > max(sizes[:at], default=0)]


def reserved_bytes(pricer: Any, strategies: Any, limits: Any, sizes: Sequence[int]) -> int:
    """What the allocator holds after steps of these sizes, none of them known before."""
    from memfit.memory.allocator import Allocator
    from memfit.memory.phases import with_loaded_state
    from memfit.planner.memory_price import with_libraries
    from memfit.strategies import CudaGraphs, find

    graphed = find(strategies, CudaGraphs) is not None
    ordinary, pool = Allocator(expandable_segments=graphed), Allocator()
    living: dict[Any, list[Any]] = {}

    def play(marks: Any, allocator: Any) -> None:
        for birth, kind, _, rank in marks:
            blocks = living.setdefault(kind, [])
            if birth:
                blocks.append((allocator, allocator.allocate(kind[0])))
            elif blocks:
                owner, block = blocks.pop(0 if rank < 0 else max(len(blocks) - 1 - rank, 0))
                owner.free(block)

    highest = 0
    for at, tokens in enumerate(sizes):
        trace = pricer.tracer.step(strategies, limits, tokens=tokens)
        run = pricer.priced(trace, strategies, limits)
        parts = with_libraries(run, with_loaded_state(trace.segments), pricer.task.card).parts
        if at == 0:
            for name in ("build", "start", "workspace"):
                play(parts[name], ordinary)
        if at == 1 and graphed:
            ordinary.release()
        for name in ("static", "micro", "micro_more", "update_first", "clear"):
            inside = graphed and at > 0 and name == "micro"
            play(parts.get(name, ()), pool if inside else ordinary)
        highest = max(highest, ordinary.reserved_bytes + pool.reserved_bytes)
    return highest


def error(record: Mapping[str, Any], size: str) -> float | None:
    """The prediction against the measurement: +0.01 is one percent too much."""
    measured = record["measured"][size]
    return None if measured is None else float(record["predicted"][size] / measured - 1)


def line(record: Mapping[str, Any]) -> str:
    """One run as a row of the table."""
    parts = [f"{record['name'][:58]:58s} {record['tokens']:5d}"]
    for size in ("allocated", "device"):
        off = error(record, size)
        measured = record["measured"][size]
        if off is None:
            parts.append(" " * 26)
        else:
            predicted = record["predicted"][size]
            parts.append(f"{predicted / 1e9:7.3f} {measured / 1e9:7.3f} {off:+8.2%}")
    return "  ".join(parts) + f"  {record['seconds']:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=MEASURED)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--vocab", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="names or patterns")
    parser.add_argument("--out", type=Path, help="write the records as JSON")
    parser.add_argument("--graphs-seen", action="store_true")
    options = parser.parse_args()
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(options.table, options.vocab)
        lengths = tuple(len(row["input_ids"]) for row in rows)
        drawn = drawn_tokens(rows, folder)
        records = []
        print(f"{'':58s} tokens  allocated: predicted, measured   device: predicted, measured")
        for run in (run for path in options.files for run in read(path)):
            if options.only and not any(fnmatch.fnmatch(run.name, one) for one in options.only):
                continue
            records.append(predict(run, lengths, drawn, folder, graphs_seen=options.graphs_seen))
            print(line(records[-1]), flush=True)
    for size in ("allocated", "device"):
        found = sorted(abs(off) for one in records if (off := error(one, size)) is not None)
        if found:
            print(f"{size}: median {found[len(found) // 2]:.2%}, worst {found[-1]:.2%}")
    if options.out:
        options.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
