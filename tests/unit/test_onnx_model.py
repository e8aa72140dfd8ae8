"""ONNX files of every architecture memfit trains: the same logits at any shape of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from memfit.errors import ConfigError, ModelError
from memfit.models.onnx_model import (
    SCHEMES,
    OnnxModel,
    export_onnx,
    quantize,
    require_onnx,
)

pytestmark = pytest.mark.slow

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "vocab_size": 120, "pad_token_id": 0, "num_labels": 3,
}  # fmt: skip
ROBERTA = {"max_position_embeddings": 130}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "electra": {"embedding_size": 16},
    "albert": {"embedding_size": 16},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    "deberta-v2": {
        "relative_attention": True, "position_buckets": 16, "norm_rel_ebd": "layer_norm",
        "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
        "type_vocab_size": 0,
    },
    "ernie": {},
    "modernbert": {"cls_token_id": 1, "sep_token_id": 1, "bos_token_id": 1, "eos_token_id": 1},
    "mpnet": {},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 16},
}  # fmt: skip
WITH_SEGMENTS = ("bert", "electra", "albert", "ernie")


def classifier(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, **ARCHITECTURES[kind]})
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():  # heads begin with small weights: differences would be, too
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model.eval()


def inputs(kind: str, rows: int, tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 100, (rows, tokens))
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[0, tokens // 2 :] = 0
        ids[0, tokens // 2 :] = 0
    found = {"input_ids": ids, "attention_mask": mask}
    if kind in WITH_SEGMENTS:
        found["token_type_ids"] = torch.zeros_like(ids)
    return found


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_file_answers_as_torch_at_any_shape(kind: str, tmp_path: Path) -> None:
    model = classifier(kind)
    file = tmp_path / "onnx" / "model.onnx"
    export_onnx(model, tuple(inputs(kind, 1, 2)), file)
    exported = OnnxModel(file, model.config)
    for rows, tokens in ((3, 9), (1, 5), (7, 40), (2, 100)):
        given = inputs(kind, rows, tokens)
        with torch.inference_mode():
            expected = model(**given).logits.numpy()
        answered = exported(**{name: one.numpy() for name, one in given.items()}).logits
        assert answered.shape == (rows, 3)
        assert np.abs(answered - expected).max() < 1e-3
        assert np.abs(expected).max() > 1e-2
    if kind == "roberta":
        assert exported.positions == 129


def test_every_scheme_makes_a_smaller_file_that_answers_nearly_the_same(tmp_path: Path) -> None:
    model = classifier("bert")
    file, small = tmp_path / "model.onnx", tmp_path / "model_int8.onnx"
    export_onnx(model, tuple(inputs("bert", 1, 2)), file)
    given = {name: one.numpy() for name, one in inputs("bert", 4, 12).items()}
    expected = OnnxModel(file, model.config)(**given).logits
    sizes = {}
    for scheme in SCHEMES:
        quantize(file, small, scheme)
        answered = OnnxModel(small, model.config)(**given).logits
        assert np.abs(answered - expected).max() < 0.2 * np.abs(expected).max()
        assert not np.array_equal(answered, expected)
        sizes[scheme] = small.stat().st_size
    assert sizes["per tensor"] < sizes["attention in fp32"] < file.stat().st_size
    assert sizes["per tensor"] < sizes["last layers in fp32"]


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(b"no graph")
    with pytest.raises(ModelError, match="cannot be read"):
        OnnxModel(file, AutoConfig.for_model("bert"))


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'memfit\[onnx\]'"):
        require_onnx("no_such_package_of_ours")
