"""Options, output folders and configurations that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Iterator

from malformed import Case, option, toml

OPTIONS = """
--max-length 0 | --max-length 1 | --max-length -5 | --max-length 1e3 | --max-length long
--max-length 99999 | --max-length 10000000000000000000000 | --max-length
--validation-split 0 | --validation-split 1 | --validation-split -1 | --validation-split nan
--validation-split half | --validation-split inf | --validation-split 0.0000001
--task binary | --task | --task regression --label-column review
--seed x | --seed 1.5 | --seed -1 | --seed 99999999999999999999
--text-column nope | --label-column nope | --text-pair-column nope | --label-column label,nope
--text-column review --text-pair-column review | --text-column label --label-column label
--label-names a | --label-names =x | --label-names 0= | --label-names 7=seven
--encoding utf-9 | --encoding klingon | --encoding utf-16
--validation-file nope.csv | --validation-file /dev/null | --validation-file .
--budget '4 bananas' | --budget -4GB | --budget 0 | --budget 0% | --budget 200% | --budget GB
--budget nan | --budget inf | --budget 1e999GB | --budget auto4 | --budget ""
--on-nan maybe | --on-nan | --freeze everything | --freeze -1 | --freeze 99 | --freeze 1.5
--lora 0 | --lora -3 | --lora many | --lora 8 --freeze encoder | --lora 1.5
--dtype int8 | --dtype fp8 | --attn-implementation magic
--learning-rate fast | --learning-rate | --epochs 0 | --epochs -1 | --epochs many | --epochs nan
--batch-size 0 | --batch-size -2 | --batch-size 1.5 | --batch-size x
--gradient-accumulation-steps 0 | --gradient-accumulation-steps -1
--per-device-eval-batch-size 0 | --eval-strategy sometimes | --save-strategy never
--save-strategy steps --eval-strategy epoch --load-best-model-at-end | --optim adamm | --optim
--lr-scheduler-type up | --lr-scheduler-kwargs {x} | --lr-scheduler-kwargs {"num_cycles":
--metric-for-best-model f2 | --warmup-steps x | --max-steps x | --bf16=maybe | --no-max-length
--logging-steps -1 | --weight-decay heavy | --adam-beta1 x | --report-to nowhere
--hub-strategy sometimes | --no-such-option | --Learning-Rate 1 | --learning_rat 1 | -z
--resume now | --deepspeed nope.json | --label-smoothing-factor x | --optim lomo
--config nope.toml | --config . | --output-dir | --model
"""


def options() -> Iterator[tuple[str, Case]]:
    import shlex

    lines = (item.strip() for line in OPTIONS.strip().splitlines() for item in line.split("|"))
    for words in filter(None, lines):
        yield words, option(*shlex.split(words, posix=True))


def output_folders() -> Iterator[tuple[str, Case]]:
    def output(name: str) -> Case:
        return lambda place: [*place.train(place.good()), "--output-dir", name]

    yield "out-empty", output("")
    yield "out-proc", output("/proc/nothing/here")
    yield "out-null", output("a\0b")
    yield "out-long", output("x" * 300)
    yield "out-dev", output("/dev/null")
    yield "out-a-file", lambda place: [*place.train(place.good()), "--output-dir",
                                       str(place.good())]  # fmt: skip
    yield "out-used", lambda place: [*place.train(place.good()), "--output-dir", str(place.run)]
    yield "nothing", lambda _: ["train"]
    yield "no-model", lambda place: ["train", str(place.good()), "--output-dir", "out"]
    yield "two-tables", lambda place: place.train(place.good(), str(place.good()))


TOMLS = (
    "x", "=", "[", "[data", "[data]]", "a = ", "a = 1\na = 2", "[data]\n[data]", "\0", "[[data]]",
    'data = "reviews.csv"', "model = 3", "[data]\nmax_length = 'long'", "[data]\nmax_length = 1.5",
    "[data]\nmax_length = [64]", "[data]\nmax_length = true", "[data]\nvalidation_split = 'half'",
    "[data]\nvalidation_split = {}", "[data]\ntask = 5", "[data]\ntask = ['auto']",
    "[data]\nlabel_names = 5", "[data]\nlabel_names = [1]", "[data]\nlabel_names = 'x'",
    "[data]\nseed = 'x'", "[data]\nencoding = 3.5", "[data]\ntext_column = []",
    "[data]\nlabel_column = {a = 1}", "[data]\nmax_lenght = 5", "[dta]\nx = 1",
    "[data.inner]\nx = 1",
    "[model]\nlora = 'x'", "[model]\nlora = 1.5", "[model]\nlora = true", "[model]\nfreeze = []",
    "[model]\nfrom_scratch = 'yes'", "[model]\ntrust_remote_code = 'yes'", "[model]\ndtype = 16",
    "[model]\ndtyp = 'x'", "[model]\nattn_implementation = 1.5", "budget = 1.5", "budget = []",
    "budget = '4 elephants'", "budget = true", "on_nan = 'x'", "on_nan = 3", "output_dir = []",
    "colour = 'red'", "[training]\nlearningrate = 1", "[training]\nlearning_rate = 'fast'",
    "[training]\nlearning_rate = []", "[training]\nnum_train_epochs = 'two'",
    "[training]\nnum_train_epochs = 0", "[training]\nper_device_train_batch_size = 0",
    "[training]\nper_device_train_batch_size = 'big'", "[training]\nbf16 = 'maybe'",
    "[training]\noptim = 5", "[training]\neval_strategy = 'x'", "[training]\nx.y = 1",
    "[training]\nmetric_for_best_model = 7", "[training]\nlr_scheduler_kwargs = 5",
    "[training]\nmax_steps = 1.5", "[training]\nlogging_steps = 'often'", "training = []",
    "[training]\nwarmup_steps = 'x'", "[training]\nsave_total_limit = 'x'", "d = 1979-05-27",
    "[training]\nseed = 1.5", "[training]\nseed = []",
    "[training]\ngradient_accumulation_steps = 0",
)  # fmt: skip


def configurations() -> Iterator[tuple[str, Case]]:
    for content in TOMLS:
        yield f"toml {content!r}", toml(content)
