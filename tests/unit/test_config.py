"""One configuration: flat options, TOML and Python say the same, and mistakes are named."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.config import DataConfig, ModelConfig, RunConfig, files
from memfit.config.training_fields import is_switch, takes_several, training_fields
from memfit.errors import BudgetError, ConfigError
from memfit.memory.components import Component


def build(**options: object) -> RunConfig:
    return RunConfig.build(**{"data": "reviews.csv", "model": "bert", **options})


def test_flat_options_land_in_their_tables() -> None:
    config = build(
        budget="4GB",
        output_dir="run",
        max_length=64,
        freeze=3,
        label_names=["0=負評", "1=正評"],
        learning_rate=3e-5,
        epochs=2,
    )
    assert config.data == DataConfig(
        path="reviews.csv", max_length=64, label_names={"0": "負評", "1": "正評"}
    )
    assert config.model == ModelConfig(model="bert", freeze="3")
    assert (config.budget, config.output_dir) == ("4GB", "run")
    assert config.training == {"learning_rate": 3e-5, "num_train_epochs": 2}


def test_short_names_dashes_and_full_names_are_the_same_option() -> None:
    assert (
        build(batch_size=16).training
        == build(**{"batch-size": 16}).training
        == build(per_device_train_batch_size=16).training
    )


def test_seed_is_the_splits_and_the_trainings() -> None:
    config = build(seed=7)
    assert config.data.seed == 7
    assert config.training == {"seed": 7}


def test_the_name_of_the_label_column_is_the_trainers_own_field() -> None:
    config = build(label_names=["labels"])
    assert config.data.label_names == {}
    assert config.training == {"label_names": ["labels"]}


def test_an_old_spelling_is_taken_under_its_new_name_with_a_word() -> None:
    with pytest.warns(FutureWarning, match="evaluation_strategy is now called eval_strategy"):
        config = build(evaluation_strategy="epoch")
    assert config.training == {"eval_strategy": "epoch"}


def test_options_win_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'budget = "6GB"\n[data]\npath = "a.csv"\nmax_length = 32\n'
        '[model]\nmodel = "bert"\n[training]\nlearning-rate = 1e-4\nepochs = 5\n'
    )
    config = RunConfig.build(file, max_length=48, learning_rate=None)
    assert (config.data.path, config.data.max_length) == ("a.csv", 48)
    assert config.data.validation_split == 0.1
    assert config.budget == "6GB"
    assert config.training == {"learning_rate": 1e-4, "num_train_epochs": 5}


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("lerning_rate", "learning_rate"),
        ("max_lenght", "max_length"),
        ("budgte", "budget"),
        ("epoch", "epochs"),
    ],
)
def test_an_unknown_option_suggests_the_nearest(name: str, suggested: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option '{name}'.*'{suggested}'"):
        build(**{name: 1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budgit = '4GB'", "unknown key 'budgit'.*'budget'"),
        ("[data]\nmax_lenght = 3", r"unknown key 'max_lenght' in \[data\].*'max_length'"),
        ("[training]\noptin = 'sgd'", r"unknown key 'optin' in \[training\].*'optim'"),
        ("data = 'a.csv'", r"data is a table; write its values under \[data\]"),
        ("[data", "is not a TOML file"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        RunConfig.from_toml(file)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        RunConfig.from_toml(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": "long"}, "max_length is 'long'; it takes a value of type int"),
        ({"max_length": True}, "max_length is True"),
        ({"max_length": 1}, "at least 2"),
        ({"validation_split": 1.5}, "between 0 and 1"),
        ({"validation_split": math.nan}, "validation_split is nan"),
        ({"task": "multilabel"}, "Did you mean 'multi_label'"),
        ({"freeze": "head"}, "write encoder, embeddings, or a number of layers"),
        ({"freeze": "-1"}, "write encoder, embeddings, or a number of layers"),
        ({"lora": 0}, "write a rank"),
        ({"dtype": "bf16"}, "one of float32, bfloat16, float16"),
        ({"label_names": ["0=", "1=b"]}, "write label=name"),
        ({"label_names": ["bad", "good"]}, "write label=name"),
        ({"label_names": ["0=bad", "0=good"]}, "label_names names '0' twice"),
        ({"from_scratch": 1}, "type bool"),
    ],
)
def test_a_wrong_value_says_what_is_taken(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**options)


def test_a_budget_that_does_not_parse_is_refused_at_once() -> None:
    with pytest.raises(BudgetError, match="4 bananas"):
        build(budget="4 bananas")


def test_missing_data_and_model_are_named() -> None:
    with pytest.raises(ConfigError, match="no data file given"):
        RunConfig.build(model="bert")
    with pytest.raises(ConfigError, match="no model given"):
        RunConfig.build(data="a.csv")


def test_toml_round_trips_every_kind_of_value(tmp_path: Path) -> None:
    config = build(
        output_dir=tmp_path,
        budget="80%",
        label_names={0: '負"評', "a b": "正\\評"},
        validation_file="v.csv",
        from_scratch=True,
        lora=8,
        learning_rate=1e-5,
        bf16=False,
        report_to=["tensorboard", "none"],
        lr_scheduler_kwargs={"num_cycles": 2, "deep": {"min_lr": 1e-7}},
    )
    file = tmp_path / "run.toml"
    file.write_text(config.to_toml(), encoding="utf-8")
    assert RunConfig.from_toml(file) == config


def test_written_toml_is_laid_out_for_people() -> None:
    tables = {
        "data": {
            "label_names": {0: "負評", "a b": "正評"},
            "path": Path("a.csv"),
            "max_length": 64,
        },
        "budget": "4GB",
        "training": {
            "bf16": True,
            "lr": 1e-05,
            "optim": Component.WEIGHTS,
            "report_to": ["a", "b"],
        },
        "none": {},
    }
    assert (
        files.dump_toml(tables)
        == """\
budget = "4GB"

[data]
path = "a.csv"
max_length = 64

[data.label_names]
0 = "負評"
"a b" = "正評"

[training]
bf16 = true
lr = 1e-05
optim = "weights"
report_to = [
    "a",
    "b",
]

[none]
"""
    )


def test_secrets_are_never_written() -> None:
    written = build(hub_token="hf_secret", push_to_hub=True).to_toml()
    assert "hf_secret" not in written
    assert "push_to_hub = true" in written


def test_differences_name_the_values() -> None:
    assert build(learning_rate=1e-4, max_length=64).differences(build(max_length=32)) == [
        "data.max_length: 64, not 32",
        "training.learning_rate: 0.0001, which was not set",
    ]
    assert build().differences(build()) == []


_plain = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
_keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(_keys, _plain, max_size=4))
def test_what_is_written_as_toml_reads_back_the_same(values: dict[str, object]) -> None:
    import tomllib

    assert tomllib.loads(files.dump_toml(values)) == values


def test_the_training_fields_are_transformers_own() -> None:
    from transformers import TrainingArguments

    names = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    assert list(training_fields()) == names


def test_the_annotation_tells_what_a_flag_takes() -> None:
    assert is_switch("bf16")
    assert is_switch("greater_is_better")
    assert not is_switch("liger_kernel_config")
    assert takes_several("report_to")
    assert not takes_several("run_name")


def test_building_a_configuration_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from memfit.config import RunConfig;"
        "RunConfig.build(data='a', model='b', learning_rate=1.0);"
        "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_lora_and_freezing_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match=r"--lora 8 and --freeze encoder do not go together"):
        ModelConfig(model="bert", lora=8, freeze="encoder")


def test_a_plan_in_the_file_stands_beside_its_settings_and_gives_way_to_one_by_hand(
    tmp_path: Path,
) -> None:
    asked = RunConfig.build(data="a.csv", model="bert", exact=True, output_dir="out")
    plan = {"settings": asked.settings_digest(), "strategies": {"packing": {}}}
    named = dataclasses.replace(asked, named_plan=plan)
    file = tmp_path / "run.toml"
    file.write_text(named.to_toml(), encoding="utf-8")
    assert RunConfig.from_toml(file) == named
    assert RunConfig.from_toml(file).asked == asked
    # The same settings elsewhere have the same digest, and no others have.
    assert RunConfig.build(file, output_dir="else").settings_digest() == plan["settings"]
    assert RunConfig.build(file, max_length=64).settings_digest() != plan["settings"]
    file.write_text(dataclasses.replace(named, exact=False).to_toml(), encoding="utf-8")
    by_hand = RunConfig.build(file, plan="mine.toml")
    assert (by_hand.plan, by_hand.named_plan) == ("mine.toml", {})
