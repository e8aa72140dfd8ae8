"""Ranks: what the environment says of them, and the launcher that starts them."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from memfit import BudgetTrainer
from memfit.api import finetune
from memfit.cli import run
from memfit.config import RunConfig
from memfit.config.launched import LaunchedRank, launched_rank, number_for_torch
from memfit.data.working_files import new_file
from memfit.engine.effective_batch import effective_arguments
from memfit.engine.ranks import Ranks, meeting
from memfit.errors import ConfigError, RankLostError, StepMemoryError
from memfit.run.launching import _tell, count_of, ranks_to_start, start_ranks
from small_training import collate, model_of, texts


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, LaunchedRank(0, 1, 0, 1)),
        ({"RANK": "", "WORLD_SIZE": ""}, LaunchedRank(0, 1, 0, 1)),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            LaunchedRank(3, 4, 1, 2),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2"}, LaunchedRank(1, 2, 1, 2)),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "RANK": "2", "WORLD_SIZE": "3"},
            LaunchedRank(2, 3, 2, 3),
        ),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            LaunchedRank(3, 4, 1, 2),
        ),
        ({"ACCELERATE_USE_CPU": "True"}, LaunchedRank(0, 1, 0, 1)),
    ],
)
def test_ranks_are_what_the_launcher_says(environment: dict[str, str], ranks: LaunchedRank) -> None:
    assert launched_rank(environment) == ranks
    assert ranks.is_first == (ranks.rank == 0)


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "two"},
        {"WORLD_SIZE": "0"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
        {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="torchrun"):
        launched_rank(environment)


def test_numbers_of_mpi_are_handed_on_and_several_machines_need_an_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("os.environ", dict(os.environ))
        os.environ.pop("MASTER_ADDR", None)
        number_for_torch(LaunchedRank(1, 2, 1, 2))
        assert launched_rank(os.environ) == LaunchedRank(1, 2, 1, 2)
        assert os.environ["MASTER_ADDR"] == "127.0.0.1"
        del os.environ["MASTER_ADDR"]
        with pytest.raises(ConfigError, match="set MASTER_ADDR"):
            number_for_torch(LaunchedRank(3, 4, 1, 2))


def test_arguments_that_would_train_a_rank_alone_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), report_to="none")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="use_cpu=True"):
        effective_arguments(arguments)


def _leave_file(told: Any) -> None:
    told.send(str(new_file()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on this system")
def test_a_fork_has_working_files_of_its_own() -> None:
    mine = new_file()
    context = multiprocessing.get_context("fork")
    told, tell = context.Pipe()
    process = context.Process(target=_leave_file, args=(tell,))
    process.start()
    theirs = Path(told.recv())
    process.join()
    assert theirs.parents[1] != mine.parents[1]
    assert mine.parent.is_dir()


@pytest.mark.parametrize(
    ("gpus", "cards", "count"), [("auto", 0, 1), ("4", 0, 4), (2, 0, 2), ("auto", 3, 3)]
)
def test_gpus_are_cards_and_without_any_processes(
    gpus: str | int, cards: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: cards)
    assert count_of(gpus) == count


@pytest.mark.parametrize("gpus", ["0", "-1", "two", "1.5", ""])
def test_gpus_is_a_number_or_auto(gpus: str) -> None:
    with pytest.raises(ConfigError, match="such as 2, or auto"):
        count_of(gpus)


def test_more_gpus_than_cards_are_refused_unless_ranks_may_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match="--gpus is 2, and 1 are here"):
        count_of(2)
    monkeypatch.setenv("MEMFIT_SHARE_GPU", "1")
    assert count_of(2) == 2


def test_other_ranks_are_silent_and_leave_their_error_to_the_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert run(["--version"]) == 0
    assert capfd.readouterr() == ("", "")
    assert run(["predict", "nowhere"]) == 2
    assert "give either sentences or --file" in capfd.readouterr().err
    word = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(word))
    assert run(["predict", "nowhere"]) == 2
    assert capfd.readouterr() == ("", "")
    assert "give either sentences or --file" in json.loads(word.read_text())["message"]


# torch's agent leaves the log files it opened to the garbage collector.
LOGS_STAY_OPEN = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

PROBE = """
import os, pathlib, signal, sys, time
rank, threads = os.environ["RANK"], os.environ["OMP_NUM_THREADS"]
print(f"rank {rank} of {os.environ['WORLD_SIZE']} says {sys.argv[1:]}, {threads} threads")
def told(*_):
    print("told")
    sys.exit(143)
here = pathlib.Path(__file__).parent
if len(sys.argv) > 2:
    signal.signal(signal.SIGTERM, told)
    (here / f"ready{rank}").touch()
    while len(list(here.glob("ready*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if "fail" in sys.argv and rank == "1":
        sys.exit("no luck")
    if "die" in sys.argv and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if "stop" in sys.argv and rank == "0":
        time.sleep(0.5)  # torch's agent does not know its ranks until it has started them all
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
"""


def threads() -> int:
    """Half of what one process would use."""
    import torch

    return max(torch.get_num_threads() // 2, 1)


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `memfit` that says which rank it is, and fails where it is asked to."""
    (tmp_path / "memfit").mkdir()
    (tmp_path / "memfit" / "__init__.py").touch()
    (tmp_path / "memfit" / "__main__.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS")


@LOGS_STAY_OPEN
@pytest.mark.usefixtures("probe", "quick_agent")
def test_ranks_run_the_same_command_and_the_first_has_the_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = dict(os.environ)
    assert start_ranks(2, ["predict"]) == 0
    assert capfd.readouterr() == (f"rank 0 of 2 says ['predict'], {threads()} threads\n", "")
    assert dict(os.environ) == before


@LOGS_STAY_OPEN
@pytest.mark.usefixtures("probe", "quick_agent")
@pytest.mark.parametrize(
    ("word", "code", "said"),
    [
        ("fail", 1, "memfit: rank 1: no luck\n"),
        ("die", 137, "memfit: rank 1: signal 9 ended it\n"),
        ("stop", 143, ""),
    ],
)
def test_the_first_rank_that_fails_gives_the_code(
    word: str, code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start_ranks(2, ["train", word]) == code
    out, err = capfd.readouterr()
    assert err == said
    assert out == f"rank 0 of 2 says ['train', '{word}'], {threads()} threads\ntold\n"


def failure(folder: Path, rank: int, code: int, word: str = "", second: float = 0.0) -> Any:
    """How torch's agent describes a rank that failed, in its own objects and files."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = folder / "memfit_x" / "attempt_0" / str(rank) / "error.json"
    path.parent.mkdir(parents=True)
    if word:
        path.write_text(json.dumps({"message": word, "timestamp": 1e9 + second}))
    return ProcessFailure(rank, 1, code, str(path))


@pytest.mark.parametrize(
    ("words", "codes", "code", "said"),
    [
        (("no file", "no file"), (2, 2), 2, ""),
        (("no file", "others ended"), (2, 1), 2, ""),
        (("others ended", "no room"), (1, 2), 2, "memfit: rank 1: no room\n"),
        (("others ended", ""), (1, -9), 137, "memfit: rank 1: signal 9 ended it\n"),
        (("", "others ended"), (-11, 1), 139, "memfit: rank 0: signal 11 ended it\n"),
    ],
)
def test_the_cause_is_said_and_not_what_followed_from_it(
    words: tuple[str, str],
    codes: tuple[int, int],
    code: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    later = words.index("others ended") if "others ended" in words else -1
    failures = {
        rank: failure(tmp_path, rank, codes[rank], words[rank], 0.2 * (rank == later))
        for rank in (0, 1)
    }
    assert _tell(ChildFailedError("memfit", failures), tmp_path) == code
    assert capsys.readouterr().err == said


def test_gpus_is_an_option_of_a_run_like_any_other(tmp_path: Path) -> None:
    settings = tmp_path / "run.toml"
    settings.write_text("gpus = 2\n[data]\npath = 'a.csv'\n[model]\nmodel = 'm'\n")
    config = RunConfig.from_toml(settings)
    assert config.gpus == "2"
    settings.write_text(config.to_toml())
    assert RunConfig.from_toml(settings) == config
    with pytest.raises(ConfigError, match="such as 2, or auto"):
        RunConfig.build(settings, gpus="two")


def test_ranks_are_started_once_and_by_one_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig.build(data="a.csv", model="m", gpus=3)
    assert ranks_to_start(config) == 3
    assert ranks_to_start(RunConfig.build(data="a.csv", model="m")) == 1
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert ranks_to_start(config) == 1


def test_callbacks_cannot_be_sent_to_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A script that has imported Jupyter's libraries is no notebook.
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2"):
        finetune("a.csv", model="m", output_dir=tmp_path / "out", gpus=2, callbacks=[object()])


def test_a_lost_rank_is_told_from_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(RankLostError, match="process 2 of 2"), meeting():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), meeting():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_out_of_memory_on_several_ranks_names_a_smaller_budget(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=2, use_cpu=True, report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    model: Any = model_of()
    trainer = BudgetTrainer(model, args, train_dataset=texts(), data_collator=collate)
    trainer.ranks = Ranks(1, 2)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model.classifier.register_forward_pre_hook(fail)
    batch = collate(texts(4))
    with (
        trainer.guard.held(),
        pytest.raises(StepMemoryError, match=r"in step 1: .*none can run a step again") as stopped,
    ):
        trainer.guard.run(model, batch)
    assert stopped.value.smaller_budget.endswith("MB")


def test_batches_that_are_split_must_divide_by_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=8, gradient_accumulation_steps=2, use_cpu=True,
        per_device_eval_batch_size=16, accelerator_config={"split_batches": True}, report_to=[],
    )  # fmt: skip
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    ours: Any = effective_arguments(args)
    assert (ours.per_device_train_batch_size, ours.per_device_eval_batch_size) == (8, 8)
    assert not ours.accelerator_config.split_batches
    args.per_device_train_batch_size = 7
    with pytest.raises(ConfigError, match="a batch of 7 rows among 2 processes"):
        effective_arguments(args)
