"""`memfit train` as several ranks: one run, one voice, one end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_run import in_child
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback

import memfit
from memfit.cli import run
from memfit.data import working_files
from memfit.records.results import read_summary
from memfit.training.checkpoints import problem_with


class Signalled(TrainerCallback):
    """Sends this process a signal in the middle of a step."""

    def __init__(self, number: int, step: int) -> None:
        self.number, self.step = number, step

    def on_pre_optimizer_step(self, args, state, control, **kwargs):  # noqa: ARG002
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


class Mapped(TrainerCallback):
    """Leaves where the rows lie, and whether this process has made any files for rows."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def on_train_begin(self, args, state, control, train_dataloader, **kwargs):  # noqa: ARG002
        rows = [one["filename"] for one in train_dataloader.dataset.cache_files]
        made = working_files._folder_of.cache_info().currsize
        self.place.write_text(json.dumps({"rows": rows, "made": made}))


def as_rank(
    root: Path,
    words: list[str],
    number: int,
    port: int,
    machines: int,
    callbacks: list[TrainerCallback],
) -> None:
    """One of two ranks, as torchrun starts them."""
    from memfit import api

    os.environ |= {
        "RANK": str(number), "LOCAL_RANK": str(number // machines), "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": str(2 // machines), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    real = memfit.finetune
    api.finetune = lambda *args, **named: real(*args, **named, callbacks=callbacks)
    code = run(words)
    (root / "code").write_text(str(code))
    os._exit(code)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def two_ranks(
    root: Path, *words: list[str], callback: TrainerCallback | None = None, machines: int = 1
) -> tuple[list[int | None], list[str]]:
    """Exit codes and words of both; rank 1 may have other words, and has the callback."""
    port = free_port()
    root.mkdir(exist_ok=True)
    folders = [root / f"rank{number}-{len(list(root.iterdir()))}" for number in (0, 1)]
    started: list[Any] = [
        in_child(as_rank, folder, words[min(number, len(words) - 1)], number, port, machines,
                 [callback] if callback is not None and number == 1 else [])
        for number, folder in enumerate(folders)
    ]  # fmt: skip
    for process in started:
        process.join(300)
    said = [(folder / "said.txt").read_text() for folder in folders]
    return [process.exitcode for process in started], said


def test_two_ranks_are_one_training(tmp_path: Path, by_plan: list[str]) -> None:
    out = tmp_path / "out"
    words = [*by_plan, "--epochs", "2", "--output-dir", str(out)]
    codes, said = two_ranks(tmp_path, words, callback=Mapped(tmp_path / "mapped.json"))
    assert codes == [0, 0], said
    mapped = json.loads((tmp_path / "mapped.json").read_text())
    assert mapped["made"] == 0
    assert len(mapped["rows"]) == 1
    assert "16 rows a step" in said[0]
    assert "8 rows on each of 2 ranks" in said[0]
    assert [line for line in said[1].splitlines() if "[rank1]:[W" not in line] == []
    summary = read_summary(out)
    # 54 rows: 7 steps of 8 rows by one rank.
    assert (summary.training["steps"], summary.training["effective_batch"]) == (8, 16)
    assert [(one.rank, one.device) for one in summary.ranks] == [
        (0, summary.device),
        (1, summary.device),
    ]
    tokens = [one.tokens for one in summary.ranks]
    assert 0.9 < tokens[0] / tokens[1] < 1.1
    assert all(one.peak_bytes and one.step_seconds > 0 for one in summary.ranks)
    assert sorted(one.name for one in (out / "checkpoints").iterdir()) == [
        "checkpoint-4",
        "checkpoint-8",
    ]
    assert memfit.load(out).predict(["服務人員都很親切"])[0].label in ("0", "1")


# torch's agent leaves the log files it opened to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_gpus_starts_the_ranks_and_prints_what_they_made(
    tmp_path: Path, by_plan: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--epochs", "1", "--output-dir", str(out), "--resume", "--gpus", "2", "--json"]
    assert run([*by_plan, *words]) == 0
    printed, said = capfd.readouterr()
    assert json.loads(printed)["training"]["steps"] == 4
    assert "8 rows on each of 2 ranks" in said
    assert run([*by_plan, *words]) == 0  # the same command, of a run that has finished
    assert "already finished" in capfd.readouterr().err


def test_what_is_wrong_on_one_rank_ends_all_in_its_words(
    tmp_path: Path, by_plan: list[str]
) -> None:
    out = tmp_path / "out"
    words = [*by_plan, "--epochs", "1", "--output-dir", str(out)]
    other = ["train", str(tmp_path / "missing.csv"), *words[2:]]
    codes, said = two_ranks(tmp_path, words, other, machines=2)
    assert codes == [2, 2], said
    assert said[0].count("missing.csv") == 1
    assert "memfit: rank 1: " in said[0]
    assert "Traceback" not in said[0]
    assert not out.exists()


def test_a_rank_that_is_killed_ends_the_other_which_says_how_to_go_on(
    tmp_path: Path, by_plan: list[str]
) -> None:
    out = tmp_path / "out"
    words = [*by_plan, "--epochs", "3", "--output-dir", str(out)]
    codes, said = two_ranks(tmp_path, words, callback=Signalled(signal.SIGKILL, 5))
    assert codes == [1, -signal.SIGKILL], said
    assert "another process of this training has ended" in said[0]
    assert f"go on with: memfit train --resume --output-dir {out}" in said[0]
    assert "Traceback" not in said[0]
    last = json.loads((out / "progress.jsonl").read_text().splitlines()[-1])
    assert last["ended"] == "failed"


def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    tmp_path: Path, by_plan: list[str]
) -> None:
    out = tmp_path / "out"
    words = [*by_plan, "--epochs", "3", "--output-dir", str(out)]
    codes, said = two_ranks(tmp_path, words, callback=Signalled(signal.SIGTERM, 5))
    assert codes == [143, 143], said
    assert "stopped at step 6 of 12" in said[0]
    assert problem_with(out / "checkpoints" / "checkpoint-6") == ""
    codes, said = two_ranks(tmp_path, ["train", "--resume", "--output-dir", str(out)])
    assert codes == [0, 0], said
    assert "resuming from the last checkpoint, checkpoint-6" in said[0]
    assert read_summary(out).training["steps"] == 12


def losses(folder: Path) -> list[float]:
    state = json.loads((folder / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def test_accelerate_launch_trains_as_gpus_does(tmp_path: Path, by_plan: list[str]) -> None:
    words = [*by_plan, "--epochs", "1", "--logging-steps", "1", "--quiet", "--output-dir"]
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    codes, said = two_ranks(tmp_path, [*words, str(ours)])
    assert codes == [0, 0], said
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    several = [*accelerate, "--multi_gpu", "--main_process_port", "0", "-m", "memfit"]
    done = subprocess.run([*several, *words, str(theirs)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert losses(theirs) == losses(ours)
    assert len(losses(ours)) == 4
    one = subprocess.run(
        [*accelerate, "--cpu", "-m", "memfit", *words, str(tmp_path / "no")],
        capture_output=True,
        text=True,
    )
    assert one.returncode != 0
    assert "start them with memfit train --gpus 2" in one.stderr
    assert not (tmp_path / "no").exists()


def numbered_by_mpirun(_root: Path, words: list[str], number: int, port: int) -> None:
    os.environ |= {
        "OMPI_COMM_WORLD_RANK": str(number), "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(number), "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    os._exit(run(words))


def test_ranks_that_mpirun_numbers_are_one_training(tmp_path: Path, by_plan: list[str]) -> None:
    out, port = tmp_path / "out", free_port()
    words = [*by_plan, "--epochs", "1", "--output-dir", str(out)]
    started = [
        in_child(numbered_by_mpirun, tmp_path / str(number), words, number, port)
        for number in (0, 1)
    ]
    for process in started:
        process.join(300)
    said = [(tmp_path / str(number) / "said.txt").read_text() for number in (0, 1)]
    assert [process.exitcode for process in started] == [0, 0], said
    assert len(read_summary(out).ranks) == 2


CELLS = (
    """
import memfit, torch, transformers
from accelerate import notebook_launcher
torch.randn(3_000_000).exp().sum()  # by OpenMP's threads, which a fork has not

class Seen(transformers.TrainerCallback):
    def on_train_end(self, args, state, control, **_):
        (root / f"seen-by-{args.process_index}").touch()

def train(name, **more):
    memfit.finetune(reviews, model=model, output_dir=root / name, max_length=16, quiet=True,
                    per_device_train_batch_size=8, num_train_epochs=1, learning_rate=1e-3,
                    logging_steps=1, callbacks=[Seen()], plan=plan, **more)
""",
    "train('gpus', gpus=2)",
    "notebook_launcher(train, ('launcher',), num_processes=2, use_port=port)",
    """
try:
    memfit.finetune(root / "missing.csv", model=model, output_dir=root / "no", gpus=2)
except memfit.errors.MemfitError as error:
    print(error, error.exit_code)
""",
    """
args = transformers.TrainingArguments(str(root / 'before'), report_to='none')
transformers.Trainer(transformers.AutoModel.from_pretrained(model), args)
""",
    """
try:
    train('callbacks', gpus=2)
except memfit.errors.ConfigError as error:
    print(error)
""",
)


# Jupyter's libraries warn about each other.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_a_notebook_forks_its_ranks_through_accelerate(
    tmp_path: Path, by_plan: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbformat
    from nbclient import NotebookClient

    values = {
        "reviews": by_plan[1], "model": by_plan[3], "plan": by_plan[-1], "port": str(free_port())
    }  # fmt: skip
    begin = f"from pathlib import Path\nroot = Path({str(tmp_path)!r})\n" + "".join(
        f"{name} = {value!r}\n" for name, value in values.items()
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in (begin, *CELLS)]
    NotebookClient(notebook, timeout=200).execute()
    *_, missing, _, refused = (
        "".join(str(one.get("text", "")) for one in cell["outputs"]) for cell in notebook.cells
    )
    assert losses(tmp_path / "gpus") == losses(tmp_path / "launcher")
    assert len(read_summary(tmp_path / "gpus").ranks) == 2
    assert sorted(one.name for one in tmp_path.glob("seen-by-*")) == ["seen-by-0", "seen-by-1"]
    assert "missing.csv" in missing
    assert missing.strip().endswith(" 2")
    assert "something was trained in this notebook before" in refused


@pytest.fixture(scope="module")
def deep_model_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 layers x 128: more weights than activations."""
    folder = tmp_path_factory.mktemp("deep") / "model"
    shutil.copytree(tiny_model_dir, folder)
    wider = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512}
    config = BertConfig.from_pretrained(tiny_model_dir, num_hidden_layers=6, **wider)
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_a_budget_is_met_by_what_ranks_divide_among_them(
    tmp_path: Path, reviews: Path, deep_model_dir: Path
) -> None:
    """Planned, trained, stopped, resumed, evaluated, saved, and loaded by one process."""
    out = tmp_path / "out"
    words = ["train", str(reviews), "--model", str(deep_model_dir), "--epochs", "2"]
    words += ["--max-length", "16", "--batch-size", "8", "--learning-rate", "1e-3"]
    words += ["--exact", "--budget", "14MB", "--output-dir", str(out)]
    codes, said = two_ranks(tmp_path, words, callback=Signalled(signal.SIGTERM, 2))
    assert codes == [143, 143], said
    assert "stopped at step 3 of 8" in said[0]
    codes, said = two_ranks(tmp_path, ["train", "--resume", "--output-dir", str(out)])
    assert codes == [0, 0], said
    summary = read_summary(out)
    assert "fully_sharded" in summary.plan["strategies"]
    predicted, measured = summary.memory.predicted, [one.peak_bytes for one in summary.ranks]
    # A formula says what FSDP2 holds whole (planner/rank_cost.py): no less than it does.
    assert min(measured) <= predicted.device_bytes <= 1.06 * min(measured)
    assert summary.training["steps"] == 8
    assert memfit.load(out).predict(["服務人員都很親切"])[0].label in ("0", "1")
    saved = load_file(out / "model.safetensors")
    whole = BertForSequenceClassification.from_pretrained(out).state_dict()
    assert saved.keys() == whole.keys()
    assert all(torch.equal(value, whole[name]) for name, value in saved.items())


class TwoMachines:
    """Two agents of torchrun with one rank each, as on two machines; one command for all.

    What the ranks say is kept apart from what the agents say: the agent that ends last complains
    when the other one, which keeps their store, has gone.
    """

    def __init__(self, folder: Path, words: list[str]) -> None:
        agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        where = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        self._logs = [folder / f"machine{number}" for number in (0, 1)]
        self.agents = []
        for number, logs in enumerate(self._logs):
            shutil.rmtree(logs, ignore_errors=True)
            kept = ["--redirects", "3", "--log-dir", str(logs), "--node-rank", str(number)]
            command = [*agent, *kept, *where, "-m", "memfit", *words]
            self.agents.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))

    def said(self, number: int) -> str:
        """What the rank of this machine has said so far."""
        return "".join(file.read_text() for file in sorted(self._logs[number].rglob("std*.log")))

    def signal_after(self, words: str, number: int) -> None:
        """Sends a signal to both agents once rank 0 has said this."""
        deadline = time.monotonic() + 240
        while words not in self.said(0) and time.monotonic() < deadline:
            assert self.agents[0].poll() is None, self.said(0)
            time.sleep(0.1)
        for agent in self.agents:
            agent.send_signal(number)

    def codes(self) -> list[int]:
        return [agent.wait(240) for agent in self.agents]


def test_a_scheduler_runs_the_same_command_on_two_machines_until_it_is_done(
    tmp_path: Path, by_plan: list[str]
) -> None:
    out = tmp_path / "out"
    words = [*by_plan, "--epochs", "30", "--eval-strategy", "no", "--save-steps", "1000"]
    words += ["--output-dir", str(out), "--resume", "--logging-steps", "1"]
    machines = TwoMachines(tmp_path, words)
    machines.signal_after("\nstep ", signal.SIGTERM)
    codes, said = machines.codes(), machines.said(0)
    assert 0 not in codes
    assert said.count("stopping after this step") == 1, said
    stopped = re.search(r"stopped at step (\d+) of 120", said)
    assert stopped is not None, said
    assert problem_with(out / "checkpoints" / f"checkpoint-{stopped[1]}") == ""
    machines = TwoMachines(tmp_path, words)
    assert machines.codes() == [0, 0], machines.said(0)
    assert f"resuming from the last checkpoint, checkpoint-{stopped[1]}" in machines.said(0)
    assert machines.said(1) == ""
    assert read_summary(out).training["steps"] == 120
    assert memfit.load(out).predict(["服務人員都很親切"])[0].label in ("0", "1")
