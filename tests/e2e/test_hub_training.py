"""What the Trainer's own uploads carry to a hub while a model trains."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from hub_server import HubServer

TOKEN = "hf_" + "Uploaded" * 4
TESTS = Path(__file__).resolve().parents[1]
# The hub's address is read when huggingface_hub is imported, so a process trains.
TRAINING = """
import sys
from pathlib import Path
import torch, transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from memfit import BudgetTrainer, TrainingArguments
from memfit.strategies import LowBitAdamW
from small_training import collate, model_of, texts

folder, token, saved = Path(sys.argv[1]), *sys.argv[2:]
for strategy in ("checkpoint", "end"):
    args = transformers.TrainingArguments(
        str(folder / strategy), per_device_train_batch_size=4, gradient_accumulation_steps=2,
        max_steps=4, save_steps=2, learning_rate=1e-2, report_to="none", disable_tqdm=True,
        use_cpu=True, push_to_hub=True, hub_token=token, hub_model_id=f"anna/{strategy}",
        hub_always_push=True, hub_strategy=strategy,
    )
    trainer = BudgetTrainer(
        model_of(0.0), args, train_dataset=texts(), data_collator=collate,
        strategies=[LowBitAdamW()],
    )
    trainer.train()
    trainer._finish_current_push()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    masters = optimizer.fp32_state_dict(trainer.model)
    torch.save(masters, folder / f"{strategy}.pt")
    if strategy == "end":
        trainer.push_to_hub()

# As a tutorial has it: a model and its tokenizer, pushed without a training.
model = AutoModelForSequenceClassification.from_pretrained(saved)
args = TrainingArguments(str(folder / "untrained"), hub_token=token, use_cpu=True, report_to="none")
BudgetTrainer(model, args).push_to_hub()
AutoTokenizer.from_pretrained(saved).push_to_hub("anna/untrained", token=token)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def hub(folder: Path, tiny_model_dir: Path) -> Iterator[HubServer]:
    """A hub after two trainings: one uploaded its checkpoints, one was pushed at its end too.

    A model that was not trained and its tokenizer were pushed as well.
    """
    plain = {key: value for key, value in os.environ.items() if "TOKEN" not in key}
    path = os.pathsep.join([str(TESTS), *filter(None, [plain.get("PYTHONPATH")])])
    with HubServer() as server:
        server.users[TOKEN] = "anna"
        done = subprocess.run(
            [sys.executable, "-c", TRAINING, str(folder), TOKEN, str(tiny_model_dir)],
            env={**plain, **server.environment(folder), "PYTHONPATH": path},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert TOKEN not in done.stdout + done.stderr
        yield server


def _arguments_in(files: dict[str, bytes], name: str) -> dict[str, object]:
    with zipfile.ZipFile(BytesIO(files[name])) as archive:
        found = [item for item in archive.namelist() if item.endswith("data.pkl")]
        return vars(pickle.loads(archive.read(found[0])))


def test_uploads_carry_no_token_and_the_model_in_float32(hub: HubServer, folder: Path) -> None:
    files = hub.repos["anna/checkpoint"].files
    sent = [*hub.blobs.values(), *files.values()]
    assert {"training_args.bin", "last-checkpoint/training_args.bin"} <= files.keys()
    assert not any(TOKEN.encode() in content for content in sent)
    given = _arguments_in(files, "training_args.bin")
    assert given["per_device_train_batch_size"] == 4  # as the user gave it
    assert given["gradient_accumulation_steps"] == 2

    masters = torch.load(folder / "checkpoint.pt", weights_only=True)
    for name, value in load(files["model.safetensors"]).items():
        assert value.dtype == torch.float32
        assert torch.equal(value, masters[name])
    kept = load(files["last-checkpoint/model.safetensors"])  # what a run goes on from
    assert torch.bfloat16 in {value.dtype for value in kept.values()}
    assert not any("_float32" in name for name in files)
    assert b'"float32"' in files["config.json"]


def test_an_upload_that_is_asked_for_at_the_end_is_in_float32(hub: HubServer, folder: Path) -> None:
    files = hub.repos["anna/end"].files
    assert "memfit.json" not in files
    assert not any(TOKEN.encode() in content for content in [*hub.blobs.values(), *files.values()])
    masters = torch.load(folder / "end.pt", weights_only=True)
    for name, value in load(files["model.safetensors"]).items():
        assert torch.equal(value, masters[name])


def test_a_push_leaves_the_token_out_of_what_it_uploads_and_keeps(
    hub: HubServer, folder: Path
) -> None:
    files = hub.repos["anna/untrained"].files
    assert {"model.safetensors", "config.json", "tokenizer.json", "training_args.bin"} <= set(files)
    assert [name for name, content in files.items() if TOKEN.encode() in content] == []
    kept = [path for path in folder.rglob("*") if path.is_file()]
    assert [path for path in kept if TOKEN.encode() in path.read_bytes()] == []
