"""Loading models: label names and types arrive, and every way it fails has its own sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForSequenceClassification,
)

from memfit.config import ModelConfig
from memfit.data import LabelSpace
from memfit.errors import ConfigError, ModelError
from memfit.models.layers import add_lora, freeze, layers_of, lora_targets, position_limit
from memfit.models.loading import check_model_folder, load_settings, load_weights

REVIEWS = LabelSpace("single_label", ("壞", "普通", "好"))
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 50,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
}
SPECIAL = {
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    "qwen2": {"num_key_value_heads": 2},
    "modernbert": dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id"), 2)
    | {"sep_token_id": 2},
}


# DeBERTa scripts a function when it is imported, which newer torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")


def load_for_training(config: ModelConfig, labels: LabelSpace, max_length: int) -> tuple[Any, Any]:
    """As a run loads them, without what it does in between."""
    settings, tokenizer = load_settings(config, labels)
    return load_weights(config, settings, tokenizer, max_length), tokenizer


def tiny(model_type: str, **settings: Any) -> Any:
    config = AutoConfig.for_model(model_type, **SMALL, **SPECIAL.get(model_type, {}), **settings)
    return AutoModelForSequenceClassification.from_config(config)


def copy_of(folder: Path, target: Path, without: str = "") -> Path:
    shutil.copytree(folder, target)
    for item in target.glob(without) if without else ():
        item.unlink()
    return target


def learning(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_the_head_gets_the_labels_and_their_names(tiny_model_dir: Path) -> None:
    model, tokenizer = load_for_training(ModelConfig(model=str(tiny_model_dir)), REVIEWS, 64)
    assert model.config.id2label == {0: "壞", 1: "普通", 2: "好"}
    assert model.config.label2id == {"壞": 0, "普通": 1, "好": 2}
    assert model.config.problem_type == "single_label_classification"
    assert model(**tokenizer("服務", return_tensors="pt")).logits.shape == (1, 3)
    assert model.accepts_loss_kwargs is False


def test_the_same_number_of_labels_keeps_the_head(tiny_model_dir: Path) -> None:
    labels = LabelSpace("single_label", ("a", "b"))
    model, _ = load_for_training(ModelConfig(model=str(tiny_model_dir)), labels, 64)
    saved = BertForSequenceClassification.from_pretrained(tiny_model_dir)
    assert torch.equal(model.classifier.weight, saved.classifier.weight)
    assert torch.equal(
        model.bert.encoder.layer[1].output.dense.weight,
        saved.bert.encoder.layer[1].output.dense.weight,
    )


def test_a_regression_has_one_output(tiny_model_dir: Path) -> None:
    labels = LabelSpace("regression", ("stars",))
    model, _ = load_for_training(ModelConfig(model=str(tiny_model_dir)), labels, 64)
    assert (model.config.num_labels, model.config.problem_type) == (1, "regression")


def test_half_precision_weights_are_loaded_as_float32_unless_asked(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    half = BertForSequenceClassification.from_pretrained(tiny_model_dir).half()
    folder = copy_of(tiny_model_dir, tmp_path / "half")
    half.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"
    model, _ = load_for_training(ModelConfig(model=str(folder)), REVIEWS, 64)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model, _ = load_for_training(ModelConfig(model=str(folder), dtype="bfloat16"), REVIEWS, 64)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_bin_weights_are_read(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_model_dir, tmp_path / "bin", without="*.safetensors")
    saved = BertForSequenceClassification.from_pretrained(tiny_model_dir)
    torch.save(saved.state_dict(), folder / "pytorch_model.bin")
    labels = LabelSpace("single_label", ("a", "b"))
    model, _ = load_for_training(ModelConfig(model=str(folder)), labels, 64)
    assert torch.equal(model.classifier.weight, saved.classifier.weight)


def test_from_scratch_needs_no_weights(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_model_dir, tmp_path / "config-only", without="*.safetensors")
    with pytest.raises(ModelError, match=r"has no weights.*--from-scratch"):
        check_model_folder(ModelConfig(model=str(folder)))
    scratch = ModelConfig(model=str(folder), from_scratch=True)
    model, _ = load_for_training(scratch, REVIEWS, 64)
    assert model.config.num_labels == 3


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("config.json", "has no config.json"),
        ("*.safetensors", "has no weights"),
        ("tokenizer*", "has no tokenizer"),
    ],
)
def test_a_folder_with_a_part_missing_names_the_part(
    tiny_model_dir: Path, tmp_path: Path, without: str, message: str
) -> None:
    folder = copy_of(tiny_model_dir, tmp_path / "part", without=without)
    with pytest.raises(ModelError, match=message) as caught:
        load_for_training(ModelConfig(model=str(folder)), REVIEWS, 64)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"model_type": "wobble"}', r"does not know \(wobble\)"),
        ('{"hidden_size": 8}', "does not know"),
        ('{"model_type": "vit"}', r"no text classifier \(vit\)"),
        ('{"model_type": "w", "auto_map": {"AutoConfig": "c.C"}}', "--trust-remote-code"),
        ("{", "not a valid JSON"),
    ],
)
def test_a_config_that_is_not_ours_to_train_is_explained(
    tiny_model_dir: Path, tmp_path: Path, config: str, message: str
) -> None:
    folder = copy_of(tiny_model_dir, tmp_path / "odd")
    (folder / "config.json").write_text(config)
    with pytest.raises(ModelError, match=message):
        load_for_training(ModelConfig(model=str(folder)), REVIEWS, 64)


def test_weights_of_another_model_are_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_model_dir, tmp_path / "other")
    AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model("electra", **SMALL)
    ).save_pretrained(tmp_path / "electra")
    shutil.copy(tmp_path / "electra" / "model.safetensors", folder)
    with pytest.raises(ModelError, match="are not those of a BertForSequenceClassification"):
        load_for_training(ModelConfig(model=str(folder)), REVIEWS, 64)


def test_weights_of_another_shape_are_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_model_dir, tmp_path / "shape")
    settings = json.loads((folder / "config.json").read_text())
    settings["intermediate_size"] = 48
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"intermediate.* has another shape"):
        load_for_training(ModelConfig(model=str(folder)), REVIEWS, 64)


def test_damaged_weights_are_a_sentence(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_model_dir, tmp_path / "damaged")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=f"cannot load the model of {folder}"):
        load_for_training(ModelConfig(model=str(folder)), REVIEWS, 64)


def test_a_tokenizer_without_a_longest_text_has_the_models(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    del values["model_max_length"]
    path.write_text(json.dumps(values), encoding="utf-8")
    settings, tokenizer = load_settings(ModelConfig(model=str(folder)), REVIEWS)
    assert tokenizer.model_max_length == settings.max_position_embeddings


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = copy_of(tiny_model_dir, tmp_path / "grown")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["新詞"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match="do not belong together"):
        load_for_training(ModelConfig(model=str(folder)), REVIEWS, 64)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./no/such/folder", "there is no model folder ./no/such/folder"),
        ("hfl/not-there", r"cannot get the .* hfl/not-there: .*the hub is switched off"),
    ],
)
def test_a_model_that_is_nowhere_says_where_was_looked(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_for_training(ModelConfig(model=name), REVIEWS, 64)


def test_a_slip_in_a_folders_name_suggests_the_folder_and_asks_no_hub(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_of(tiny_model_dir, tmp_path / "macbert-base")
    (tmp_path / "macbert-bare").mkdir()  # holds no model
    monkeypatch.chdir(tmp_path)
    for name in ("macbert-bas", "./macbert-bas", str(tmp_path / "macbertbase")):
        with pytest.raises(ModelError, match=r"there is no model folder .*; did you mean .*-base"):
            check_model_folder(ModelConfig(model=name))
    check_model_folder(ModelConfig(model="hfl/macbert-base"))  # a hub id
    check_model_folder(ModelConfig(model="bert-base-chinese"))
    with pytest.raises(ModelError, match="check the path"):
        check_model_folder(ModelConfig(model="models/hfl/macbert"))


def test_a_file_and_an_adapter_are_not_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="LoRA adapter only"):
        check_model_folder(ModelConfig(model=str(tmp_path)))
    with pytest.raises(ModelError, match="is a file"):
        check_model_folder(ModelConfig(model=str(tmp_path / "adapter_config.json")))


def test_tensorflow_weights_are_told_apart(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_model_dir, tmp_path / "tf", without="*.safetensors")
    (folder / "tf_model.h5").touch()
    with pytest.raises(ModelError, match=r"tf_model\.h5 is not PyTorch's"):
        check_model_folder(ModelConfig(model=str(folder)))


def test_max_length_beyond_the_positions_says_the_limit(tiny_model_dir: Path) -> None:
    load_for_training(ModelConfig(model=str(tiny_model_dir)), REVIEWS, 64)
    with pytest.raises(ConfigError, match="max_length 65 is beyond the 64 positions"):
        load_for_training(ModelConfig(model=str(tiny_model_dir)), REVIEWS, 65)


def test_an_unknown_attention_is_a_config_error(tiny_model_dir: Path) -> None:
    config = ModelConfig(model=str(tiny_model_dir), attn_implementation="flash_attention_9")
    with pytest.raises(ConfigError, match="--attn-implementation flash_attention_9"):
        load_for_training(config, REVIEWS, 64)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "mpnet", "distilbert", "electra"])
def test_the_position_limit_is_the_longest_text_that_runs(model_type: str) -> None:
    model = tiny(model_type).eval()
    limit = position_limit(model)
    assert limit == (38 if model_type in ("roberta", "mpnet") else 40)
    model(input_ids=torch.full((1, limit), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, limit + 1), 5))


def test_rotary_positions_are_limited_by_the_config_and_relative_ones_not_at_all() -> None:
    assert position_limit(tiny("qwen2")) == 40
    assert position_limit(tiny("modernbert")) == 40
    assert position_limit(tiny("deberta-v2", position_biased_input=False)) is None


def test_freezing_the_encoder_leaves_the_head() -> None:
    model = tiny("bert")
    frozen = freeze(model, "encoder")
    assert learning(model) == {"classifier.weight", "classifier.bias"}
    assert frozen == sum(parameter.numel() for parameter in model.bert.parameters())


def test_freezing_layers_takes_the_embeddings_under_them() -> None:
    model = tiny("roberta")
    freeze(model, "1")
    names = learning(model)
    assert not any(name.startswith("roberta.embeddings") for name in names)
    assert not any(name.startswith("roberta.encoder.layer.0") for name in names)
    assert any(name.startswith("roberta.encoder.layer.1") for name in names)
    model = tiny("qwen2")
    freeze(model, "embeddings")
    assert "model.embed_tokens.weight" not in learning(model)
    assert "model.layers.0.mlp.up_proj.weight" in learning(model)


def test_freezing_more_layers_than_there_are_is_refused() -> None:
    assert len(layers_of(tiny("bert"))) == 2
    with pytest.raises(ConfigError, match="more than the 2 layers"):
        freeze(tiny("bert"), "3")


@pytest.mark.parametrize(
    ("model_type", "targets", "head"),
    [
        ("bert", ("query", "value"), {"classifier"}),
        ("roberta", ("query", "value"), {"classifier"}),
        ("ernie", ("query", "value"), {"classifier"}),
        ("albert", ("query", "value"), {"classifier"}),
        ("electra", ("query", "value"), {"classifier"}),
        ("distilbert", ("q_lin", "v_lin"), {"pre_classifier", "classifier"}),
        ("mpnet", ("q", "v"), {"classifier"}),
        ("deberta-v2", ("query_proj", "value_proj"), {"pooler", "classifier"}),
        ("modernbert", ("Wqkv",), {"head", "classifier"}),
        ("qwen2", ("q_proj", "v_proj"), {"score"}),
    ],
)
def test_lora_adapts_the_attention_and_trains_the_whole_head(
    model_type: str, targets: tuple[str, ...], head: set[str]
) -> None:
    model = tiny(model_type)
    assert lora_targets(model) == targets
    adapted = add_lora(model, 4)
    trained = learning(adapted)
    adapters = {name for name in trained if ".lora_" in name}
    assert adapters
    assert all(name.split(".lora_")[0].rpartition(".")[2] in targets for name in adapters)
    whole = {name.split(".modules_to_save")[0].rpartition(".")[2] for name in trained - adapters}
    assert whole == head


def test_lora_also_trains_a_pooler_the_checkpoint_lacks(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = copy_of(tiny_model_dir, tmp_path / "no-pooler")
    weights = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in weights.items() if "pooler" not in key}
    assert len(kept) == len(weights) - 2
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    for source, expected in ((folder, True), (tiny_model_dir, False)):
        labels = LabelSpace("single_label", ("a", "b"))
        model, _ = load_for_training(ModelConfig(model=str(source), lora=2), labels, 64)
        assert any("pooler" in name for name in learning(model)) is expected


def test_a_decoder_gets_a_padding_token(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<end>": 0, "good": 1, "bad": 2}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    tokenizer.save_pretrained(tmp_path)
    config = AutoConfig.for_model(
        "stablelm", **{**SMALL, "pad_token_id": None}, num_key_value_heads=2
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    model, loaded = load_for_training(ModelConfig(model=str(tmp_path)), REVIEWS, 40)
    assert (loaded.pad_token, model.config.pad_token_id) == ("<end>", 0)
    batch = loaded(["good", "good bad bad"], padding=True, return_tensors="pt")
    assert model(**batch).logits.shape == (2, 3)
