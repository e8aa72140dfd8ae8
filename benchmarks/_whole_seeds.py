"""What plans do to F1: memfit beside fp32 AdamW of the stock Trainer, with paired seeds.

    python benchmarks/whole_runs.py --seeds 5 --data ChnSentiCorp_htl_all.csv \
        --real m3e-small=FOLDER --plans 4GB "2GB --exact" plan.toml --jobs 5

A plan is a budget, which may be followed by `--exact` or `--allow lora`, or a plan.toml. Both sides
of a pair have the same seed, the same rows to train and to validate on (memfit's split), the same
tokens and learning rate, three epochs, an effective batch of 32, and score the weights of the best
epoch. Half of the rows are for validation: with 777 rows, chance alone moves the F1 of a pair by
half a point. A process a seed; inside of it, one training after the other.

For single runs of pre-trained weights (`--only real`) this file trains the stock side alone.

`--first-seed` takes others than 0 and following. `--no-dropout` trains both sides without it: an
exact plan then has to give the stock Trainer's F1, since only dropout's masks differ.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

if TYPE_CHECKING:
    from whole_runs import Bench, ResultFile

STOCK = "stock fp32 AdamW"
EPOCHS, LENGTH, BATCH, VALIDATION = 3, 128, 32, 0.5
SINGLE_SEED, SINGLE_VALIDATION, SINGLE_RATE = 42, 0.1, 2e-5
"""The defaults of `memfit train`; the stock side of a single run uses them too."""


def compare(bench: Bench, results: ResultFile) -> None:
    """A process a seed and model; the differences and their intervals at the end."""
    from quality import interval

    options = bench.options
    if not bench.real:
        raise SystemExit("--seeds needs pre-trained weights: --real NAME=FOLDER")
    results.machine(bench.loader.ask(do="stamp"))
    bench.close_workers()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in bench.real}
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    which = f", seeds from {seeds[0]} on" if seeds[0] else ""
    if options.no_dropout:
        which += ", no dropout"
    folders = {
        name: without_dropout(folder, bench.work / f"{name}-no-dropout")
        if options.no_dropout
        else folder
        for name, folder in bench.real.items()
    }

    def record(name: str) -> None:
        """The table of a model, with what there is so far."""
        stock = {run["seed"]: run["f1"] for run in runs[name] if run["plan"] == STOCK}
        for plan in options.plans:
            found = [run for run in runs[name] if run["plan"] == plan and run["seed"] in stock]
            if not found:
                continue
            pairs = [run["f1"] - stock[run["seed"]] for run in found]
            row: dict[str, Any] = {
                "name": f"{name}, {plan}{which}", "model": name, "points": interval(pairs),
                "seeds": len(pairs),
                "f1": [run["f1"] for run in found],
                "stock_f1": [stock[run["seed"]] for run in found],
                "strategies": found[-1]["strategies"], "fidelity": found[-1]["fidelity"],
                "runs": found, "rows": options.rows or "all",
                "learning_rate": options.learning_rate,
            }  # fmt: skip
            results.add(row, "seeds")

    def one(job: tuple[str, int]) -> None:
        name, seed = job
        with tempfile.TemporaryDirectory(dir=bench.work) as folder:
            asked = {
                "table": str(bench.tables["single"]), "model": folders[name], "seed": seed,
                "plans": options.plans, "folder": folder, "rate": options.learning_rate,
            }  # fmt: skip
            command = [sys.executable, __file__, json.dumps(asked)]
            log = bench.work / f"seed-{name}-{seed}.log"
            with (
                log.open("w") as errors,
                subprocess.Popen(
                    command, env=bench.environment, stdout=subprocess.PIPE, stderr=errors, text=True
                ) as process,
            ):
                assert process.stdout is not None
                limit = threading.Timer(options.timeout * (len(options.plans) + 1), process.kill)
                limit.daemon = True
                limit.start()
                for line in process.stdout:
                    if line.startswith("RESULT "):
                        run = json.loads(line.removeprefix("RESULT "))
                        runs[name].append(run)
                        print(f"{name} seed {seed}, {run['plan']}: {run['f1']:.4f}", flush=True)
                        record(name)
                limit.cancel()
            if process.returncode:
                told = log.read_text(errors="replace")[-1500:]
                print(f"{name} seed {seed} FAILED\n{told}", flush=True)

    jobs = [(name, seed) for seed in seeds for name in bench.real]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, jobs))
    for row in results.values.get("seeds", []):
        points = {key: round(value, 3) for key, value in row["points"].items()}
        print(f"{row['name']}: {points} points of F1, {row['seeds']} seeds", flush=True)


def without_dropout(folder: str, copy: Path) -> str:
    """The same model in another folder, with every dropout of its configuration at 0."""
    shutil.copytree(folder, copy)
    file = copy / "config.json"
    file.chmod(0o644)
    config = json.loads(file.read_text())
    file.write_text(json.dumps({k: 0.0 if is_dropout(k, v) else v for k, v in config.items()}))
    return str(copy)


def is_dropout(field: str, value: object) -> bool:
    """Whether this field of a configuration is the share that a dropout drops."""
    return "dropout" in field and isinstance(value, float)


def run_seed(table: str, model: str, seed: int, plans: list[str], folder: str, rate: float) -> None:
    """Every plan and the stock Trainer, each a line of JSON."""
    for number, plan in enumerate([STOCK, *plans]):
        started = time.perf_counter()
        if plan == STOCK:
            found = stock(table, model, folder, seed=seed, rate=rate)
        else:
            found = with_plan(table, model, seed, plan, f"{folder}/{number}", rate)
        found |= {"plan": plan, "seed": seed, "seconds": time.perf_counter() - started}
        print("RESULT " + json.dumps(found), flush=True)


def with_plan(
    table: str, model: str, seed: int, plan: str, folder: str, rate: float
) -> dict[str, Any]:
    """memfit.finetune inside a budget, or by a plan."""
    import memfit

    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--allow")
    asked = parser.parse_args(shlex.split(plan))
    given: dict[str, Any] = {"budget": asked.what}
    if asked.what.endswith(".toml"):
        given = {"plan": asked.what}
    if asked.exact:
        given["exact"] = True
    if asked.allow:
        given["allow"] = asked.allow
    result = memfit.finetune(
        table, model=model, output_dir=folder, seed=seed, quiet=True, max_length=LENGTH,
        per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS, learning_rate=rate,
        text_column="review", label_column="label", validation_split=VALIDATION,
        positive_label="1", **given,
    )  # fmt: skip
    used = result.summary.plan
    return {
        "f1": result.metrics["f1"], "accuracy": result.metrics["accuracy"],
        "strategies": used.get("strategies"), "fidelity": used.get("fidelity"),
    }  # fmt: skip


def stock(
    table: str,
    model: str,
    folder: str,
    *,
    seed: int,
    rate: float,
    epochs: int = EPOCHS,
    validation: float = VALIDATION,
) -> dict[str, Any]:
    """The untouched Trainer in fp32 on the same rows, the best epoch's weights scored."""
    import torch
    import transformers
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from memfit.config import DataConfig
    from memfit.data import read_table, tokenize
    from memfit.records.evaluation import compute_metrics_for

    config = DataConfig(
        path=table, max_length=LENGTH, seed=seed, text_column="review", label_column="label",
        validation_split=validation,
    )  # fmt: skip
    text = read_table(config)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenize(text, tokenizer, LENGTH)
    transformers.set_seed(seed)
    network = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=len(text.labels.names), dtype=torch.float32
    )
    args = transformers.TrainingArguments(
        f"{folder}/stock", num_train_epochs=epochs, per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=64, learning_rate=rate, seed=seed, eval_strategy="epoch",
        save_strategy="epoch", save_only_model=True, load_best_model_at_end=True,
        metric_for_best_model="f1", report_to="none", disable_tqdm=True, logging_steps=10_000,
        dataloader_pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
    trainer = transformers.Trainer(
        network, args, train_dataset=rows_of(tokens.train), eval_dataset=rows_of(tokens.validation),
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics_for(text.labels.task, text.labels.names),
    )  # fmt: skip
    trainer.train()
    found = trainer.evaluate()
    return {"f1": found["eval_f1"], "accuracy": found["eval_accuracy"]}


def rows_of(dataset: Any) -> list[dict[str, Any]]:
    """Plain rows: no formatter of `datasets` is needed to read them."""
    names = [one for one in ("input_ids", "attention_mask", "token_type_ids", "labels", "label")
             if one in dataset.column_names]  # fmt: skip
    columns = {name: list(dataset[name]) for name in names}
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    for row in rows:
        if "label" in row:
            row["labels"] = row.pop("label")
    return rows


def single_stock_f1(bench: Bench, table: str, model: str, epochs: int) -> float | None:
    """F1 of the stock Trainer beside a single `memfit train`; None if its process fails."""
    with tempfile.TemporaryDirectory(dir=bench.work) as folder:
        asked = {
            "table": table, "model": model, "folder": folder, "seed": SINGLE_SEED,
            "rate": SINGLE_RATE, "epochs": epochs, "validation": SINGLE_VALIDATION,
        }  # fmt: skip
        words = [sys.executable, __file__, "--stock", json.dumps(asked)]
        ended = bench.run(words, Path(folder))
    for _, line in ended.said.lines:
        if line.startswith("RESULT "):
            found: float = json.loads(line.removeprefix("RESULT "))["f1"]
            return found
    print(f"the stock Trainer did not train {model}: {ended.said.text[-1500:]}", flush=True)
    return None


if __name__ == "__main__":
    if sys.argv[1] == "--stock":
        print("RESULT " + json.dumps(stock(**json.loads(sys.argv[2]))), flush=True)
    else:
        run_seed(**json.loads(sys.argv[1]))
