"""What else can be wrong with what was given, in English and in Chinese.

error_messages.py has the errors people meet most; a `{hint}` is ' Did you mean X?' or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "path.empty": {
        "en": "{what} is {path}, which is no name; write a path",
        "zh": "{what} 是 {path}，这不是文件名；请写一个路径",
    },
    "path.long": {
        "en": "{what} begins with {path} and is too long a name; check it",
        "zh": "{what} 以 {path} 开头，名字太长；请检查",
    },
    "path.data": {"en": "the data file", "zh": "数据文件"},
    "most": {
        "en": "{flag} is {value}; write {most} or less",
        "zh": "{flag} 是 {value}；请写 {most} 或更小的数",
    },
    "least": {
        "en": "{flag} is {value}; write 1 or more",
        "zh": "{flag} 是 {value}；请写 1 或更大的数",
    },
    "spec.least": {
        "en": "{what} is {value}; it must be at least 1",
        "zh": "{what} 是 {value}；至少要为 1",
    },
    "halves": {
        "en": "--bf16 and --fp16 exclude each other; choose one",
        "zh": "--bf16 与 --fp16 互相排斥；请选一个",
    },
    "half.dtype": {
        "en": "--{name} computes in half precision over float32 weights and --dtype {dtype} has "
        "none; choose one",
        "zh": "--{name} 以半精度计算、权重为 float32，而 --dtype {dtype} 没有这样的权重；请选一个",
    },
    "unpriced": {
        "en": "{name} changes the memory of a step in ways that are not priced yet",
        "zh": "{name} 对一步显存的影响还不能估算",
    },
    "task": {
        "en": "task is {task}; it is one of single_label, multi_label, regression",
        "zh": "task 是 {task}；可选的有 single_label、multi_label、regression",
    },
    "note.dtype": {
        "en": "the checkpoint is {dtype} and transformers loads it so: add --dtype {dtype} to "
        "price that",
        "zh": "这个检查点是 {dtype}，transformers 会原样加载：加上 --dtype {dtype} 才按它估算",
    },
    "note.bf16": {
        "en": "{card} has no bf16 units, which came with capability 8.0: use {instead}",
        "zh": "{card} 没有 bf16 单元（计算能力 8.0 起才有）：请用 {instead}",
    },
    "card.unknown": {
        "en": "no card {name} is known.{hint} Known are: {known}",
        "zh": "不认识显卡 {name}。{hint}已知的有：{known}",
    },
    "card.several": {
        "en": "{name} may be {cards}; write which one",
        "zh": "{name} 可能是 {cards}；请写明是哪一种",
    },
    "card.either": {"en": "{first} or {last}", "zh": "{first} 或 {last}"},
    "trackers": {
        "en": "--report-to is {name}; it is none, all, or some of {known}.{hint}",
        "zh": "--report-to 是 {name}；可以是 none、all，或以下几种：{known}。{hint}",
    },
    "tracker": {
        "en": "--report-to {name} does not work here: {reason}",
        "zh": "--report-to {name} 在这里用不了：{reason}",
    },
    "field": {
        "en": "{value} is not one of its {kind}.{hint}",
        "zh": "{value} 不是 {kind} 的取值。{hint}",
    },
    "field.choices": {"en": " It is one of {choices}.", "zh": "可选的有 {choices}。"},
    "kind.bool": {"en": "true or false", "zh": "true 或 false"},
    "kind.int": {"en": "a whole number", "zh": "整数"},
    "kind.float": {"en": "a number", "zh": "数"},
    "kind.str": {"en": "a word", "zh": "一个词"},
    "kind.list": {"en": "a list", "zh": "列表"},
    "kind.dict": {"en": "a table of names and values", "zh": "名称和值的表"},
    "kind.or": {"en": "{first} or {last}", "zh": "{first}或{last}"},
    "rung": {
        "en": "there is no rung {name}; they are {known}.{hint}",
        "zh": "没有梯级 {name}；有 {known}。{hint}",
    },
    "metric": {
        "en": "there is no metric {name} here; known are {known}.{hint}",
        "zh": "这里没有指标 {name}；已知的有 {known}。{hint}",
    },
}

_MODELS: Mapping[str, Mapping[str, str]] = {
    "freeze.nothing": {
        "en": "--freeze {what} froze nothing: {model} has no such part that learns",
        "zh": "--freeze {what} 没有冻结任何东西：{model} 没有这样的可训练部分",
    },
    "freeze.layers": {
        "en": "--freeze {count} is more than the {layers} layers of {model}; write encoder to "
        "freeze all of it",
        "zh": "--freeze {count} 超过了 {model} 的 {layers} 层；要全部冻结请写 encoder",
    },
    "lora.targets": {
        "en": "--lora does not know the attention projections of {model}; give BudgetTrainer a "
        "model prepared with peft",
        "zh": "--lora 不认识 {model} 的注意力投影；请把用 peft 准备好的模型交给 BudgetTrainer",
    },
    "lora.peft": {
        "en": "--lora needs peft; install it with: pip install memfit[lora]",
        "zh": "--lora 需要 peft；请安装：pip install memfit[lora]",
    },
    "model.count": {
        "en": "the config.json of {model} has {key} {count}; download it again",
        "zh": "{model} 的 config.json 里 {key} 是 {count}；请重新下载",
    },
    "model.attention": {
        "en": "--attn-implementation {name} does not work here: {reason}",
        "zh": "--attn-implementation {name} 在这里用不了：{reason}",
    },
    "model.foreign": {
        "en": "the weights of {model} are not those of a {kind}: {missing} of {count} of the "
        "model's weights are not among them",
        "zh": "{model} 的权重不是 {kind} 的：模型的 {count} 个权重里缺 {missing} 个",
    },
    "model.broken": {
        "en": "cannot load the model of {model}: {reason}; download it again",
        "zh": "无法加载 {model} 的模型：{reason}；请重新下载",
    },
    "model.broken.tokenizer": {
        "en": "cannot load the tokenizer of {model}: {reason}; download it again",
        "zh": "无法加载 {model} 的分词器：{reason}；请重新下载",
    },
    "json.invalid": {
        "en": "{file} is not a valid JSON file",
        "zh": "{file} 不是有效的 JSON 文件",
    },
    "json.object": {"en": "{file} holds no JSON object", "zh": "{file} 里不是 JSON 对象"},
    "json.weights": {"en": "{file} lists no weights", "zh": "{file} 没有列出权重"},
    "model.confused": {
        "en": "its files hold values that cannot be ({reason})",
        "zh": "文件里有不可能的值（{reason}）",
    },
    "model.built": {
        "en": "cannot build a classifier of {kind}: {reason}",
        "zh": "无法构建 {kind} 的分类模型：{reason}",
    },
    "model.built.none": {"en": "it has none", "zh": "它没有分类模型"},
    "model.weights": {
        "en": "the model folder {folder} has no weights; it needs model.safetensors or "
        "pytorch_model.bin beside config.json",
        "zh": "模型文件夹 {folder} 里没有权重；config.json 旁边需要有 model.safetensors 或 "
        "pytorch_model.bin",
    },
    "run.unfinished": {
        "en": "the run in {folder} has not finished; continue it with memfit train --resume "
        "--output-dir {folder}",
        "zh": "{folder} 里的训练还没有完成；继续：memfit train --resume --output-dir {folder}",
    },
    "run.unfinished.checkpoint": {
        "en": "the run in {folder} has not finished; continue it with memfit train --resume "
        "--output-dir {folder}, or name a checkpoint of it ({checkpoint})",
        "zh": "{folder} 里的训练还没有完成；继续：memfit train --resume --output-dir {folder}，"
        "或指明它的一个检查点（{checkpoint}）",
    },
    "flash.none": {
        "en": "{model} does not support flash attention; try sdpa",
        "zh": "{model} 不支持 flash attention；请试试 sdpa",
    },
    "flash.half": {
        "en": "flash attention computes in half precision only; add bf16 or fp16",
        "zh": "flash attention 只能用半精度计算；请加上 bf16 或 fp16",
    },
}

_USE: Mapping[str, Mapping[str, str]] = {
    "texts.mixed": {
        "en": "some of the texts are pairs and some are not; give one kind",
        "zh": "有的文本是句对，有的不是；请只给一种",
    },
    "texts.kind": {
        "en": "text {number} is {text}; give a text or a pair of texts",
        "zh": "第 {number} 条文本是 {text}；请给出一段文本或一个句对",
    },
    "texts.pairs": {
        "en": "this model was trained on pairs of texts and got single ones; give both: --file "
        "with --text-column and --text-pair-column, or tuples of two in Python",
        "zh": "这个模型是用句对训练的，得到的却是单句；请两句都给：--file 加 --text-column 和 "
        "--text-pair-column，在 Python 里用二元组",
    },
    "texts.single": {
        "en": "this model was trained on single texts and got pairs; name the column to use with "
        "--text-column",
        "zh": "这个模型是用单句训练的，得到的却是句对；请用 --text-column 指明用哪一列",
    },
    "device": {
        "en": "the device {name} cannot be used ({reason}); leave it out, or write cpu",
        "zh": "设备 {name} 用不了（{reason}）；请不写，或写 cpu",
    },
    "positions": {
        "en": "max_length {length} is beyond the {limit} positions of {model}; write {limit} or "
        "less",
        "zh": "max_length {length} 超过了 {model} 的 {limit} 个位置；请写 {limit} 或更小",
    },
    "evaluate.none": {
        "en": "there are no rows to evaluate on; give a validation file or a split",
        "zh": "没有可以评估的行；请给出验证文件或切分比例",
    },
    "evaluate.nan": {
        "en": "the model answers {rows} of {count} rows with NaN: the training has diverged; "
        "lower the learning rate or train in bf16 or fp32 instead of fp16",
        "zh": "模型对 {count} 行中的 {rows} 行给出 NaN：训练已发散；请降低学习率，"
        "或用 bf16、fp32 代替 fp16",
    },
    "evaluate.label": {
        "en": "the data has the label id {label}, but the model knows only 0 to {most} ({names})",
        "zh": "数据里有标签 id {label}，而模型只有 0 到 {most}（{names}）",
    },
    "predict.rows": {
        "en": "{path} has a header and no rows; add rows",
        "zh": "{path} 只有表头，没有数据行；请加上数据行",
    },
    "predict.same": {
        "en": "{path} is the file the texts come from; name another --output",
        "zh": "{path} 就是文本所在的文件；请换一个 --output",
    },
    "predict.folder": {
        "en": "{path} is a folder; name a file with --output",
        "zh": "{path} 是一个文件夹；请用 --output 指定文件",
    },
    "predict.nowhere": {
        "en": "there is no folder {folder} for {name}; make it first",
        "zh": "{name} 要写入的文件夹 {folder} 不存在；请先建好",
    },
    "predict.ending": {
        "en": "cannot write {ending} files; name the output .csv, .tsv or .jsonl",
        "zh": "不能写 {ending} 文件；输出文件请用 .csv、.tsv 或 .jsonl",
    },
    "unwritten": {"en": "cannot write {path}: {reason}", "zh": "无法写入 {path}：{reason}"},
    "unread": {"en": "cannot read {path}: {reason}", "zh": "无法读取 {path}：{reason}"},
    "unread.json": {
        "en": "cannot read {path}: it holds no JSON object",
        "zh": "无法读取 {path}：里面不是 JSON 对象",
    },
    "unread.summary": {
        "en": "{path} is not a summary that memfit wrote: {reason}",
        "zh": "{path} 不是 memfit 写的汇总：{reason}",
    },
    "unread.evaluation": {
        "en": "{path} is not an evaluation that memfit wrote: {reason}",
        "zh": "{path} 不是 memfit 写的评估结果：{reason}",
    },
    "many.twice": {"en": "{path} is given twice", "zh": "{path} 给出了两次"},
    "many.resume": {
        "en": "there are no runs to resume in {folder}; leave --resume out",
        "zh": "{folder} 里没有可以继续的训练；请去掉 --resume",
    },
    "folder.file": {
        "en": "cannot write to {folder}: it is a file; name a folder",
        "zh": "无法写入 {folder}：它是一个文件；请给出文件夹",
    },
    "folder.other": {
        "en": "the folder {folder} holds something else; name another with --output-dir",
        "zh": "文件夹 {folder} 里有别的东西；请用 --output-dir 换一个",
    },
    "folder.unmade": {
        "en": "cannot make the folder {folder}: {reason}",
        "zh": "无法新建文件夹 {folder}：{reason}",
    },
}

MESSAGES: Mapping[str, Mapping[str, str]] = {**_OPTIONS, **_MODELS, **_USE}
