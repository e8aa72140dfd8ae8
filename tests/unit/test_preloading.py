"""Libraries are loaded when it costs least, and only those that are needed."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.run import preloading
from memfit.run.inference import Classifier


def test_what_the_first_step_needs_is_there_and_nothing_for_the_end() -> None:
    """In a process of its own: here everything is loaded already."""
    script = """
import gc, sys
from memfit.run import preloading
assert "torch" not in sys.modules
usual = gc.get_threshold()
preloading.own_process()
assert gc.get_threshold()[0] > 10 * usual[0]
preloading.load_libraries()
assert gc.get_threshold() == usual
for name in ("torch", "transformers.trainer", "memfit.training.trainer"):
    assert name in sys.modules, name
for name in ("matplotlib", *preloading._LEFT_OUT):
    assert name not in sys.modules, name
from transformers.loss import loss_for_object_detection
found = loss_for_object_detection.linear_sum_assignment([[1.0, 0.0], [0.0, 1.0]])
assert [list(one) for one in found] == [[0, 1], [1, 0]]
assert "scipy.optimize" in sys.modules
import transformers
from transformers.trainer_utils import _is_peft_model
size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 9}
config = transformers.BertConfig(**size, intermediate_size=8)
model = transformers.BertForSequenceClassification(config)
assert not _is_peft_model(model) and "peft" not in sys.modules
from peft import LoraConfig, get_peft_model
assert _is_peft_model(get_peft_model(model, LoraConfig(target_modules=["query"])))
assert not _is_peft_model(model.bert)
from transformers.utils import import_utils
models, make = transformers.models, import_utils.define_import_structure.__wrapped__
whole = import_utils._LazyModule("models", models.__file__, make(models.__file__))
assert len(whole._class_to_module) > 1000
assert models._class_to_module == whole._class_to_module and models._modules == whole._modules
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", script], check=True)


def test_an_answer_waits_neither_for_the_compiler_nor_for_clusters(tiny_model_dir: Path) -> None:
    """Nor does a trace. The answer is that of a process that loads everything.

    The compiler still loads afterwards.
    """
    script = f"""
import sys
from memfit.run import preloading
from memfit.run.inference import Classifier
preloading.own_process()
classifier = Classifier.load({str(tiny_model_dir)!r}, device="cpu")
print(repr(classifier.logits(["good film", "bad"]).tolist()))
loaded = {{"scipy", "triton", "torch.distributed.tensor"}} & set(sys.modules)
assert not loaded, loaded
preloading.load_to_plan()
import torch, scipy
from memfit.memory.tracing.fake_tensors import fake_trace
with fake_trace():
    weight = torch.nn.Parameter(torch.zeros(3))
    twice = lambda given: given * torch.tensor(2.0)
    torch.utils.checkpoint.checkpoint(twice, weight, use_reentrant=False).sum().backward()
assert not any(name.startswith("torch._dynamo.convert") for name in sys.modules)
compiled = torch.compile(lambda x: x + 1, backend="eager")
assert compiled(torch.ones(1)).item() == 2
assert torch.distributed.is_available() and torch._dynamo.is_compiling() is False
assert torch._dynamo.source.LocalSource("x").name
"""
    run = subprocess.run(
        [sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True
    )
    here = Classifier.load(tiny_model_dir, device="cpu").logits(["good film", "bad"])
    assert ast.literal_eval(run.stdout) == here.tolist()


def test_without_peft_nothing_stands_in_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    with preloading.left_out():
        assert "peft" not in sys.modules
