"""The tutorials our users read run with memfit, block by block.

Their blocks are read from the folder beside the checkout. Where it is missing the same steps
run from OWN_BLOCKS, written for this file.
"""

from __future__ import annotations

import copy
import csv
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tutorial import Notebook, python_blocks

from hub_server import HubServer
from memfit import BudgetTrainer, TrainingArguments

pytestmark = [
    # The old spellings are meant to warn; what they warn about is tested on its own.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

REVIEWS = (
    ("房间很干净，服务也好", 1),
    ("位置方便，早餐丰富，下次还来", 1),
    ("前台态度差，等了很久", 0),
    ("隔音不好，空调是坏的，不推荐", 0),
)

TUTOR = "roberthsu2003"
TOKEN = "hf_" + "aB3dE6gH" * 4
PUSHED = "---- pushed ----"
IN_ITS_OWN_PROCESS = f"""
import sys
from pathlib import Path
here, seeds, model, table = sys.argv[1:]
sys.path.insert(0, here)
from tutorial import Notebook, python_blocks
first, second, third = (python_blocks(path) for path in sorted(Path(seeds).glob("*.txt"))[:3])
notebook = Notebook(model=Path(model), table=Path(table))
for block in third[:6]:
    notebook.run(block)
notebook.run(second[-1].replace("training_args", "train_args"))
for block in third[6:8]:  # log in, push the model and the tokenizer
    notebook.run(block)
print({PUSHED!r}, flush=True)
notebook.run(third[8])
"""

OWN_BLOCKS = {
    "data": """
dataset = load_dataset("csv", data_files="ChnSentiCorp_htl_all.csv", split="train")
dataset = dataset.filter(lambda row: row["review"] is not None)
datasets = dataset.train_test_split(test_size=0.1)
""",
    "tokenize": """
tokenizer = AutoTokenizer.from_pretrained("hfl/rbt3")
def encode(rows):
    encoded = tokenizer(rows["review"], max_length=32, truncation=True, padding="max_length")
    encoded["labels"] = rows["label"]
    return encoded
tokenized_datasets = datasets.map(encode, batched=True, remove_columns=dataset.column_names)
model = AutoModelForSequenceClassification.from_pretrained("hfl/rbt3")
""",
    "metric": """
accuracy, f1 = evaluate.load("accuracy"), evaluate.load("metrics/f1/f1.py")
def eval_metric(prediction):
    logits, labels = prediction
    guesses = logits.argmax(axis=-1)
    both = accuracy.compute(predictions=guesses, references=labels)
    both.update(f1.compute(predictions=guesses, references=labels))
    return both
""",
    "arguments": """
train_args = TrainingArguments(
    output_dir="./checkpoints", per_device_train_batch_size=1, gradient_accumulation_steps=32,
    gradient_checkpointing=True, optim="adafactor", per_device_eval_batch_size=1,
    num_train_epochs=1, evaluation_strategy="epoch", save_strategy="epoch", save_total_limit=3,
    learning_rate=2e-5, weight_decay=0.01, metric_for_best_model="f1",
    load_best_model_at_end=True, report_to="None",
)
""",
    "freeze and train": """
for name, param in model.bert.named_parameters():
    param.requires_grad = False
trainer = Trainer(model=model, args=train_args, train_dataset=tokenized_datasets["train"],
                  eval_dataset=tokenized_datasets["test"],
                  data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
                  compute_metrics=eval_metric)
trainer.train()
""",
}


@pytest.fixture(scope="session")
def seeds(shared: Path) -> list[Path]:
    return sorted((shared / "seeds").glob("*.txt"))


@pytest.fixture(scope="session")
def small_bert(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    """Two layers, 32 wide, random weights, the vocabulary the tutorials' models share."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    folder = tmp_path_factory.mktemp("small-bert")
    vocabulary = shared / "data" / "bert-base-chinese-vocab.txt"
    BertTokenizerFast(vocab_file=str(vocabulary), vocab=str(vocabulary)).save_pretrained(folder)
    config = BertConfig(
        vocab_size=21128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=128,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture
def notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_bert: Path, shared: Path
) -> Notebook:
    monkeypatch.chdir(tmp_path)  # the tutorials write to ./checkpoints
    return Notebook(model=small_bert, table=shared / "data" / "ChnSentiCorp_htl_all.csv")


def blocks_with(seeds: list[Path], number: int, *words: str) -> list[str]:
    """The blocks of one tutorial that hold all the words."""
    blocks = python_blocks(seeds[number])
    return [block for block in blocks if all(word in block for word in words)]


def run_until_trainer(notebook: Notebook, seeds: list[Path]) -> None:
    """Load, split, tokenize, model and metric, as the first tutorial has them."""
    for word in (
        "load_dataset(",
        "train_test_split(",
        ".map(",
        "ForSequenceClassification.from",
        "evaluate.load(",
    ):
        for block in blocks_with(seeds, 0, word)[:1]:
            notebook.run(block)


@pytest.fixture(scope="module")
def loaded(small_bert: Path, shared: Path, seeds: list[Path]) -> Notebook:
    """A notebook that has come to the trainer; tests go on in copies of it."""
    notebook = Notebook(model=small_bert, table=shared / "data" / "ChnSentiCorp_htl_all.csv")
    run_until_trainer(notebook, seeds)
    return notebook


@pytest.fixture
def at_the_trainer(loaded: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    monkeypatch.chdir(tmp_path)
    names = dict(loaded.names)
    names["model"] = copy.deepcopy(names["model"])
    names["tokenized_datasets"] = copy.copy(names["tokenized_datasets"])
    return Notebook(model=loaded.model, table=loaded.table, names=names)


def shorten(tokenized: Any) -> None:
    """The first tenth of the rows: 640 to learn from, 80 to evaluate on one by one."""
    for split, rows in (("train", 640), ("test", 80)):
        tokenized[split] = tokenized[split].select(range(rows))


def test_every_block_is_python_we_run(seeds: list[Path]) -> None:
    # 12 + 7 + 9 + 2 + 11: should the tutorials change, this test says so first.
    assert [len(python_blocks(path)) for path in seeds] == [12, 7, 9, 2, 11]


def test_loading_cleaning_splitting_and_tokenizing(loaded: Notebook) -> None:
    assert loaded.names["dataset"].num_rows == 7765
    tokenized = loaded.names["tokenized_datasets"]
    assert (tokenized["train"].num_rows, tokenized["test"].num_rows) == (6988, 777)
    assert set(tokenized["train"].column_names) == {
        "input_ids", "token_type_ids", "attention_mask", "labels",
    }  # fmt: skip
    assert max(map(len, tokenized["train"]["input_ids"])) == 128


@pytest.mark.parametrize("number", range(5))
def test_every_arguments_block_is_accepted(
    notebook: Notebook, seeds: list[Path], number: int
) -> None:
    blocks = blocks_with(seeds, number, "TrainingArguments(")
    assert blocks
    for block in blocks:
        alone = block.split("trainer = Trainer(")[0]  # one block goes on to train
        notebook.names.pop("train_args", None)
        notebook.run(re.sub(r"^acc.*?^(?=train_args)", "", alone, flags=re.DOTALL | re.MULTILINE))
        made = [value for value in notebook.names.values() if isinstance(value, TrainingArguments)]
        assert made
        assert all(arguments.eval_strategy == "epoch" for arguments in made)
        assert all(arguments.report_to == [] for arguments in made)


def test_the_memory_rungs_train_and_evaluate(at_the_trainer: Notebook, seeds: list[Path]) -> None:
    """Batch 1 x 32, checkpointing, Adafactor, frozen encoder: the second tutorial from its top."""
    notebook = at_the_trainer
    before = notebook.names["model"].bert.pooler.dense.weight.clone()
    blocks = python_blocks(seeds[1])
    for block in blocks[:-1]:
        notebook.run(block)
    # The last rung's arguments, on the first tenth of the rows: the rest is the same again.
    notebook.names["training_args"] = notebook.names["training_args_4"]
    shorten(notebook.names["tokenized_datasets"])
    notebook.run(blocks[-1])
    trainer = notebook.names["trainer"]
    assert isinstance(trainer, BudgetTrainer)
    assert trainer.state.global_step == 20  # 640 rows, effective batch 32
    assert (trainer.model.bert.pooler.dense.weight == before).all()
    assert "eval_f1" in trainer.state.log_history[-2] or "eval_f1" in trainer.state.log_history[-1]
    assert Path("checkpoint/checkpoint-20/model.safetensors").is_file()


def test_tokenizing_padded_to_32(at_the_trainer: Notebook, seeds: list[Path]) -> None:
    for block in python_blocks(seeds[3]):
        at_the_trainer.run(block)
    rows = at_the_trainer.names["tokenized_datasets"]["train"]["input_ids"]
    assert {len(row) for row in rows} == {32}


def test_the_fifth_tutorial_from_top_to_bottom(notebook: Notebook, seeds: list[Path]) -> None:
    blocks = python_blocks(seeds[4])
    for block in blocks[:4]:
        notebook.run(block)
    shorten(notebook.names["tokenized_dataset"])
    for block in blocks[4:]:
        notebook.run(block)
    assert notebook.names["trainer"].args.optim == "adafactor"
    frozen = [p.requires_grad for p in notebook.names["model"].bert.parameters()]
    assert not any(frozen)
    notebook.names["trainer"].train()
    assert notebook.names["trainer"].state.global_step == 20
    test = notebook.names["datasets"]["test"]
    padded = test.map(notebook.names["process_function"], batched=True)
    assert {len(row) for row in padded["input_ids"]} == {32}


def test_the_third_tutorial_trains_pushes_and_answers_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: Path, m3e_small: Path
) -> None:
    """Every block of it as written, log in and push included, with a hub on localhost.

    Seconds of CPU are not enough to learn the task at the tutorial's 2e-5, so it goes on from a
    head that knows it. The hub's client reads its endpoint when it is imported: the blocks run in
    a process of their own.
    """
    monkeypatch.chdir(tmp_path)
    table = short_service_reviews(shared / "data" / "ChnSentiCorp_htl_all.csv", tmp_path, pairs=16)
    started = with_a_head_for(table, m3e_small, tmp_path / "started")
    with HubServer() as hub:
        hub.users[TOKEN] = TUTOR
        done = subprocess.run(
            [sys.executable, "-c", IN_ITS_OWN_PROCESS, str(Path(__file__).parent),
             str(shared / "seeds"), str(started), str(table)],
            env={**os.environ, **hub.environment(tmp_path)}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, _, said = done.stdout.partition(PUSHED)
    assert said.split() == ["服務人員都很親切", "正評", "服務人員都不親切", "負評"]
    pushed = hub.repos[f"{TUTOR}/checkpoints"]
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= set(pushed.files)
    assert TUTOR in pushed.commits  # the tutorial gives it as the message
    assert not any(name.startswith("checkpoint-") for name in pushed.files)
    # The token is with the hub's client, and nowhere else.
    assert TOKEN not in done.stdout + done.stderr
    assert all(TOKEN.encode() not in content for content in pushed.files.values())
    assert len(hub.asked("GET", "model.safetensors")) == 1  # the pipeline fetched what was pushed


def short_service_reviews(source: Path, folder: Path, pairs: int) -> Path:
    """As many positive as negative reviews of at most 40 characters that speak of the service."""
    with source.open(encoding="utf-8", newline="") as file:
        rows = [
            (row["label"], row["review"])
            for row in csv.DictReader(file)
            if "服务" in row["review"] and len(row["review"]) <= 40
        ]
    path = folder / "service.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("label", "review"))
        for label in ("0", "1"):
            writer.writerows([row for row in rows if row[0] == label][:pairs])
    return path


def with_a_head_for(table: Path, encoder: Path, folder: Path) -> Path:
    """The encoder with a head fitted to the table, under the labels of a model given no names."""
    from sklearn.linear_model import LogisticRegression
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    with table.open(encoding="utf-8", newline="") as file:
        labels, texts = zip(
            *((row["label"], row["review"]) for row in csv.DictReader(file)), strict=True
        )
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    model = AutoModelForSequenceClassification.from_pretrained(encoder).eval()
    with torch.no_grad():
        pooled = model.bert(**tokenizer(texts, return_tensors="pt", padding=True)).pooler_output
    fitted = LogisticRegression(C=100, max_iter=1000).fit(pooled.numpy(), labels)
    with torch.no_grad():
        for of_one, values in (
            (model.classifier.weight, fitted.coef_),
            (model.classifier.bias, fitted.intercept_),
        ):
            of_one[1:] = torch.as_tensor(values, dtype=of_one.dtype)
            of_one[:1] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_same_steps_without_the_tutorials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    table = tmp_path / "reviews.csv"
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("label", "review"))
        writer.writerows([(label, text) for text, label in REVIEWS] * 20)
        writer.writerow(("1", ""))
    notebook = Notebook(model=tiny_model_dir, table=table)
    for block in OWN_BLOCKS.values():
        notebook.run(block)
    assert notebook.names["dataset"].num_rows == 80
    assert notebook.names["trainer"].state.global_step == 3  # 72 rows, effective batch 32
