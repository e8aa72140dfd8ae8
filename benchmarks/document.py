"""Every figure of the README and the docs, from the committed results: pictures and tables.

    python benchmarks/document.py            # draw the pictures, fill the marked blocks
    python benchmarks/document.py --check    # only say whether they are up to date

A block in a page lies between `<!-- figures: NAME -->` and `<!-- end of figures -->` and is
written here, never by hand. Measures and predicts nothing itself: memory_gpu.py and
memory_accuracy.py do.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _recipe_chart as chart
import _table_words as words
import _whole_document as whole
import memory_accuracy as accuracy
from _plan_words import strategy_of, strategy_words
from memfit.i18n import pt, speaking, t
from memfit.ladders import show
from memfit.ladders.rungs import RungOutcome

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md", "README.zh.md",
    *(
        f"docs/{folder}{name}.md"
        for name in ("installing", "quickstart", "estimating", "planning", "memory",
                     "predicting", "from-the-tutorials", "ladder", "surviving",
                     "whole-runs")
        for folder in ("", "zh/")
    ),
)  # fmt: skip
BLOCK = re.compile(r"(<!-- figures: (?P<name>[\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
LARGE = "bert-large/"
RECIPE = (
    "32x1/len128/mixed/adamw_torch_fused",
    "1x32/len128/mixed/adamw_torch_fused",
    "1x32/len128/mixed/adamw_torch_fused/gradient_checkpointing",
    "1x32/len128/mixed/adafactor/gradient_checkpointing",
    "1x32/len128/mixed/adafactor/gradient_checkpointing/freeze-encoder",
    "1x32/len32/mixed/adafactor/gradient_checkpointing/freeze-encoder",
)
OURS = ("large 4GB", "large 3GB", "large 2GB")
"""memfit's rows in the picture: plans run inside these budgets."""
STEPS = 219
"""Of an epoch: 6,988 reviews, 32 at a time."""
EXPERT = (
    "32x1/len128/mixed/adamw_torch_fused/bf16",
    "32x1/len128/mixed/adamw_torch_fused/bf16/gradient_checkpointing",
    "32x1/len128/mixed/adafactor/bf16/gradient_checkpointing",
)
NAMES = {
    "en": ("tensors (`max_memory_allocated`)", "reserved by PyTorch", "on the device (NVML)"),
    "zh": ("张量（`max_memory_allocated`）", "PyTorch 预留", "整块显卡（NVML）"),
}
HEADS = {
    "en": (
        "peak of a run",
        "{known} runs it was written on: median error",
        "worst",
        "{held_out} held-out runs: median error",
        "worst",
    ),
    "zh": (
        "一次训练的峰值",
        "开发时用过的 {known} 次训练：误差中位数",
        "最大",
        "没用过的 {held_out} 次训练：误差中位数",
        "最大",
    ),
}
BERT_LARGE_HEADS = {
    "en": ("every parameter trained", "tensors GiB", "reserved GiB", "device GiB", "epoch s"),
    "zh": ("训练全部参数", "张量 GiB", "预留 GiB", "整卡 GiB", "一轮秒数"),
}
BERT_LARGE: dict[str, dict[str, str]] = {
    "24-bit, kept and clipped, graphs": {
        "en": "with clipping by the global norm, nothing recomputed",
        "zh": "按全局范数裁剪梯度，不重计算",
    },
    "everything offloaded": {
        "en": "weights, optimizer, gradients and activations in host memory",
        "zh": "权重、优化器、梯度和激活都放在主机内存",
    },
    "24-bit, 8-bit gradients clipped, recompute, graphs, not fused": {
        "en": "with clipping by the global norm; every layer recomputed",
        "zh": "按全局范数裁剪梯度，每层重计算",
    },
    "stock bf16 + checkpointing + Adafactor": {
        "en": "for comparison, the stock Trainer: bf16, checkpointing, Adafactor",
        "zh": "对照：原版 Trainer，bf16、梯度检查点、Adafactor",
    },
}
F1_HEADS = {"en": ("seed", "F1"), "zh": ("种子", "F1")}


@functools.cache
def measured(results: Path = accuracy.MEASURED) -> dict[str, dict[str, Any]]:
    """The measured runs by their id."""
    return {run["case"]["id"]: run for run in read(results)["runs"]}


@functools.cache
def predicted(results: Path = accuracy.MEASURED) -> dict[str, dict[str, Any]]:
    """What was predicted of the runs in a file, by their id."""
    records = read(accuracy.PREDICTED[results])["runs"]
    if {record["id"] for record in records} != measured(results).keys():
        raise SystemExit(f"run memory_accuracy.py: {results.name} has runs without a prediction")
    return {record["id"]: record for record in records}


def read(results: Path) -> dict[str, Any]:
    """A result file."""
    found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    return found


def step_seconds(run: Mapping[str, Any]) -> float:
    """A warm step's time: the first one loads kernels."""
    return statistics.median(step["seconds"] for step in run["measured"]["steps"][1:])


def recipe_rungs() -> list[chart.Rung]:
    """The rungs of the recipe as the picture wants them."""
    rungs = []
    for name in RECIPE:
        record = predicted()[LARGE + name]
        sizes = record["predicted"]
        unused = sizes["reserved_bytes"] - sizes["allocated_bytes"]
        rungs.append(
            chart.Rung(
                parts={**record["components"], "unused": unused},
                measured_bytes=record["measured"]["device_bytes"],
                step_seconds=step_seconds(measured()[LARGE + name]),
            )
        )
    return rungs


def our_rungs() -> list[chart.Rung]:
    """memfit's own runs, for the same picture."""
    runs = read(accuracy.RESULTS / "plan_h200.json")["runs"]
    chosen = {run["pair"]: run for run in runs if run["chosen"]}
    rungs = []
    for run in (chosen[name] for name in OURS):
        sizes = run["predicted"]
        unused = sizes["reserved_bytes"] - sizes["allocated_bytes"]
        rungs.append(
            chart.Rung(
                parts={**sizes["components"], "unused": unused},
                measured_bytes=run["measured"]["device_bytes"],
                step_seconds=run["measured"]["step_seconds"],
            )
        )
    return rungs


def results_table(language: str) -> str:
    """The README's small table: some of the picture's rows, as a newcomer reads them."""
    rungs = [*recipe_rungs(), *our_rungs()]
    rows = []
    for index, (name, trained) in words.RESULT_ROWS[language].items():
        rung = rungs[index]
        size, time = f"{rung.measured_bytes / 1e9:.1f} GB", f"{rung.step_seconds * 1e3:,.0f} ms"
        rows.append((name, size, time, trained))
    return table(words.RESULT_HEADS[language], rows)


def accuracy_table(language: str) -> str:
    """How far off the predictions are: of the runs they were written on, and of others."""
    known, held_out = predicted(), predicted(accuracy.HELD_OUT)
    counts = {"known": len(known), "held_out": len(held_out)}
    found = [accuracy.summary(list(records.values())) for records in (known, held_out)]
    rows = []
    for name, size in zip(NAMES[language], accuracy.SIZES, strict=True):
        errors = (f"{part[size][which]:.2%}" for part in found for which in ("median", "worst"))
        rows.append((name, *errors))
    return table([head.format(**counts) for head in HEADS[language]], rows)


def family_table(language: str) -> str:
    """The worst error by model, of all runs."""
    families: dict[str, list[dict[str, Any]]] = {}
    for name, record in (*predicted().items(), *predicted(accuracy.HELD_OUT).items()):
        families.setdefault(name.split("/")[0], []).append(record)
    rows = []
    for name, records in families.items():
        found = accuracy.summary(records)
        worst = (f"{found[size]['worst']:.2%}" for size in accuracy.SIZES)
        rows.append((name, str(len(records)), *worst))
    return table(words.FAMILY_HEADS[language], rows)


def quality_table(language: str) -> str:
    """F1 with every weight trained, and what each saving does to it."""
    to = words.BETWEEN[language]
    rows = []
    for row in read(accuracy.RESULTS / "quality_h200.json")["summary"]:
        if row["model"] == "m3e-small" and row["variant"] in words.QUALITY:
            off = row["points_from_baseline"]
            between = f"{off['low']:+.2f} {to} {off['high']:+.2f}" if off["mean"] else ""
            points = f"{off['mean']:+.2f}" if off["mean"] else ""
            name = words.QUALITY[row["variant"]][language]
            rows.append((name, f"{row['f1']:.4f}", points, between))
    order = [names[language] for names in words.QUALITY.values()]
    rows.sort(key=lambda row: order.index(row[0]))
    return table(words.QUALITY_HEADS[language], rows)


def rounding_table(language: str) -> str:
    """What strategies of fidelity `rounding` do to F1: the mean, and how far it may be off."""
    return points_table(language, "quality_h200.json", words.ROUNDING)


def no_bf16_table(language: str) -> str:
    """The same of what cards without bfloat16 do."""
    return points_table(language, "quality_fp16_h200.json", words.NO_BF16)


def points_table(language: str, file: str, variants: Mapping[str, Mapping[str, str]]) -> str:
    """The difference to fp32 AdamW by variant and model; nothing where it was not measured."""
    if not (accuracy.RESULTS / file).is_file():
        return ""
    summary = read(accuracy.RESULTS / file)["summary"]
    found = {(row["model"], row["variant"]): row["points_from_baseline"] for row in summary}

    def told(model: str, variant: str) -> str:
        points = found.get((model, variant))
        if points is None or "high" not in points:
            return ""
        half_width = (points["high"] - points["low"]) / 2
        return f"{points['mean']:+.2f} ± {half_width:.2f}"

    rows = [
        (names[language], *(told(model, variant) for model in words.ROUNDING_MODELS))
        for variant, names in variants.items()
    ]
    return table(words.ROUNDING_HEADS[language], rows)


def train_f1_table(language: str) -> str:
    """What `memfit train` reaches, seed by seed."""
    found = read(accuracy.RESULTS / "train_f1_h200.json")
    return table(F1_HEADS[language], [(str(n), f"{f1:.4f}") for n, f1 in enumerate(found["f1"])])


def bert_large_table(language: str) -> str:
    """What strategies make of BERT-Large, beside the stock runs of the same shape."""
    found = {run["name"]: run for run in read(accuracy.RESULTS / "bert_large_h200.json")["runs"]}
    rows = []
    for name, called in BERT_LARGE.items():
        run = found[name]
        reserved = run["max_memory_reserved"]
        device = reserved + run["context_bytes"]
        sizes = (run["max_memory_allocated"], reserved, device)
        rows.append((called[language], *map(gib, sizes), f"{run['epoch_seconds']:.1f}"))
    return table(BERT_LARGE_HEADS[language], rows)


def plan_table(language: str) -> str:
    """Plans run inside their budgets: what was predicted and measured, and the best of others."""
    runs = read(accuracy.RESULTS / "plan_h200.json")["runs"]
    if any(run["measured"]["num_ooms"] for run in runs):
        raise SystemExit("a plan ran out of memory, and the pages say that none did")
    rows = []
    for pair, called in words.PLAN_PAIRS.items():
        beside = [run for run in runs if run["pair"] == pair]
        (chosen,) = (run for run in beside if run["chosen"])
        others = [run["measured"]["step_seconds"] for run in beside if not run["chosen"]]
        found, said = (chosen[part]["device_bytes"] for part in ("measured", "predicted"))
        sizes = (f"{said / 1e9:.2f}", f"{found / 1e9:.2f}", f"{said / found - 1:+.1%}")
        steps = (chosen["measured"]["step_seconds"], min(others, default=None))
        times = ("" if one is None else f"{one * 1e3:.1f}" for one in steps)
        rows.append((called[language], plan_words(chosen, language), *sizes, *times))
    return table(words.PLAN_HEADS[language], rows, texts=2)


def plan_words(run: Mapping[str, Any], language: str) -> str:
    """What a plan does, but for what all of them do."""
    with speaking(language):
        used = map(strategy_of, run["strategies"])
        said = [strategy_words(name, one) for name, one in used if name not in words.UNSAID]
        if run["max_tokens"] is not None:
            said.append(t("micro-batches of {tokens} tokens", tokens=f"{run['max_tokens']:,}"))
        return pt("clauses", ", ").join(said)


def guard_table(language: str) -> str:
    """An epoch inside 4 GB, alone and beside a greedy neighbour."""
    rows = []
    for run in read(accuracy.RESULTS / "guard_h200.json")["runs"]:
        if run["above_cap"] or run["steps"] != STEPS:
            raise SystemExit("the guarded run was above its cap, or did not end")
        name = words.GUARD_ROWS[language][run["disturbed"]]
        numbers = (str(run["num_ooms"]), str(len(run["adjustments"])))
        size = f"{run['highest_bytes'] / 1e9:.2f}"
        rows.append((name, f"{run['train_seconds']:.1f}", size, *numbers))
    return table(words.GUARD_HEADS[language], rows)


def ladder_table(language: str) -> str:
    """The ladder on a CPU: bytes, predicted and counted, and times within the run."""
    found = read(accuracy.RESULTS / "ladder_cpu.json")
    heads = words.LADDER_HEADS[language]
    rows = []
    with speaking(language):
        for values in found["outcomes"]:
            one, times = RungOutcome.from_json(values), values["times_baseline"]
            parts = ", ".join(t(show.PARTS[part]) for part in one.rung.targets)
            peaks = (one.predicted, one.measured)
            sizes = ("" if peak is None else mib(peak.device_bytes) for peak in peaks)
            time = "" if times is None else f"{times:.2f}"
            fidelity = t(show.FIDELITY_NAMES[one.fidelity]) if one.fidelity else ""
            rows.append((show.name_of(one.rung), parts, *sizes, time, fidelity))
    return table(heads, rows)


def inference_table(language: str) -> str:
    """Rows a second of answers on a CPU, by processor time: other programs do not change it."""
    found = read(accuracy.RESULTS / "inference_speed.json")
    rows = []
    for name, called in words.INFERENCE_ROWS.items():
        seconds = [one[name]["cpu"] for one in found["rounds"]]
        ours = [one["predict --file"]["cpu"] for one in found["rounds"]]
        ratio = statistics.median(a / b for a, b in zip(seconds, ours, strict=True))
        rate = 2 * found["rows"] / statistics.median(seconds)
        rows.append((called[language], f"{rate:.0f}", f"{ratio:.2f}"))
    return table(words.INFERENCE_HEADS[language], rows)


def inference_memory_table(language: str) -> str:
    """Peak memory of `memfit predict --file` by the rows of the file."""
    cases = read(accuracy.RESULTS / "inference_memory.json")["cases"]
    counts = sorted({case["rows"] for case in cases})
    peaks = {(case["ending"], case["rows"]): case["peak_bytes"] for case in cases}
    heads = [words.INFERENCE_MEMORY_HEAD[language].format(rows=f"{rows:,}") for rows in counts]
    endings = dict.fromkeys(case["ending"] for case in cases)
    rows = [(f"`.{one}`", *(f"{peaks[one, n] / 2**20:.0f} MiB" for n in counts)) for one in endings]
    return table(("", *heads), rows)


def recipe_table(language: str) -> str:
    """What each rung of the recipe holds and takes, and what was predicted of it."""
    pictures = {"en": chart.ENGLISH, "zh": chart.CHINESE}
    names = [*pictures[language].rungs, *words.EXPERT[language]]
    rows = []
    for name, case in zip(names, (*RECIPE, *EXPERT), strict=True):
        record, run = predicted()[LARGE + case], measured()[LARGE + case]
        sizes = [gib(record["measured"][size]) for size in accuracy.SIZES]
        off = f"{accuracy.error(record, 'device_bytes'):+.2%}"
        learns = words.LEARNS[language]["freeze" in case]
        rows.append((name, *sizes, off, f"{step_seconds(run):.2f}", learns))
    return table(words.RECIPE_HEADS[language], rows)


def component_table(language: str) -> str:
    """The parts of a step, read off the allocator's counters of measured runs."""
    first, *last = words.COMPONENT_ROWS[language]
    names = (first, *words.EXPERT[language], *last)
    cases = (RECIPE[0], *EXPERT, RECIPE[1], RECIPE[-1])
    rows = []
    for name, case in zip(names, cases, strict=True):
        found = measured()[LARGE + case]["measured"]
        step = found["steps"][1]
        optimizer = step["after_bytes"] - found["model_bytes"] - found["left_bytes"]
        stays = step["after_bytes"]
        gradients = step["with_gradients_bytes"] - stays
        sizes = (found["model_bytes"], optimizer, found["left_bytes"], gradients)
        rest = found["max_memory_allocated"] - stays
        rows.append((name, *(mib(size) for size in (*sizes, rest, found["context_bytes"]))))
    return table(words.COMPONENT_HEADS[language], rows)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A Markdown table: so many columns of text, then numbers, to the right."""
    marks = [*("---" for _ in heads[:texts]), *("---:" for _ in heads[texts:])]
    lines = [heads, marks, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def gib(count: int) -> str:
    """For a table whose head names the unit."""
    return f"{count / 2**30:.2f}"


def mib(count: int) -> str:
    """For a table whose head names the unit."""
    return f"{count / 2**20:,.0f}"


TABLES: Mapping[str, Callable[[str], str]] = {
    "accuracy": accuracy_table,
    "bert-large": bert_large_table,
    "components": component_table,
    "families": family_table,
    "guard": guard_table,
    "inference": inference_table,
    "inference-memory": inference_memory_table,
    "ladder": ladder_table,
    "no-bf16": no_bf16_table,
    "plans": plan_table,
    "quality": quality_table,
    "recipe": recipe_table,
    "results": results_table,
    "rounding": rounding_table,
    "train-f1": train_f1_table,
    "whole-acted": whole.acted_table,
    "whole-facts": whole.facts_table,
    "whole-real": whole.real_table,
    "whole-runs": whole.runs_table,
    "whole-seeds": whole.seeds_table,
    "whole-stock": whole.stock_table,
}
# A block's name is its table's, with -zh for the Chinese one.
BLOCKS: Mapping[str, Callable[[], str]] = {
    f"{name}{suffix}": functools.partial(make, language)
    for name, make in TABLES.items()
    for language, suffix in (("en", ""), ("zh", "-zh"))
}


def documents() -> dict[Path, str]:
    """Every page and picture as it should be."""
    pages = {ROOT / name: filled((ROOT / name).read_text(encoding="utf-8")) for name in PAGES}
    pictures = {"recipe.svg": chart.ENGLISH, "recipe.zh.svg": chart.CHINESE}
    images = ROOT / "docs" / "images"
    rungs = [*recipe_rungs(), *our_rungs()]
    drawn = {images / name: chart.draw(said, rungs) for name, said in pictures.items()}
    return {**pages, **drawn}


def filled(page: str) -> str:
    """The page with its marked blocks written anew."""
    return BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match['name']]()}{match[3]}", page)


def outdated() -> list[Path]:
    """What differs from what the results say."""
    return [
        path
        for path, text in documents().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    stale = outdated()
    if args.check and stale:
        sys.exit("not up to date: " + ", ".join(str(path.relative_to(ROOT)) for path in stale))
    for path, text in documents().items():
        if path in stale:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
