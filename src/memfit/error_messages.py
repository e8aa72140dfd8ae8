"""The errors people meet most, in English and in Chinese; and how a time is written.

Each says what is wrong, where, and what to do. A `{hint}` is ' Did you mean X?' or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

_GENERAL: Mapping[str, Mapping[str, str]] = {
    "time.short": {"en": "{seconds:.1f} s", "zh": "{seconds:.1f} 秒"},
    "time.seconds": {"en": "{seconds} s", "zh": "{seconds} 秒"},
    "time.minutes": {
        "en": "{minutes} min {seconds:02d} s",
        "zh": "{minutes} 分 {seconds:02d} 秒",
    },
    "time.hours": {
        "en": "{hours} h {minutes:02d} min",
        "zh": "{hours} 小时 {minutes:02d} 分",
    },
    "nearest": {"en": " Did you mean {name}?", "zh": "你是不是要写 {name}？"},
    "stopped.model": {
        "en": "{what}; the training itself had come to its end, and its model is saved in {folder}",
        "zh": "{what}；训练本身已经完成，模型已保存在 {folder}",
    },
    "stopped.nothing": {
        "en": "{what}; no checkpoint had been written",
        "zh": "{what}；还没有写过检查点",
    },
    "stopped.good": {
        "en": "{what}; the last good checkpoint is {checkpoint}",
        "zh": "{what}；最近的完好检查点是 {checkpoint}",
    },
    "stopped.resume": {
        "en": "{what}; the last good checkpoint is {checkpoint}; go on with: {command}",
        "zh": "{what}；最近的完好检查点是 {checkpoint}；继续：{command}",
    },
    "size": {
        "en": "cannot read {text} as a size; write 4GB, 4GiB or 3500MB",
        "zh": "看不懂大小 {text}；请写 4GB、4GiB 或 3500MB",
    },
    "budget.share": {
        "en": "a budget of {text} makes no sense; write 1% to 100%",
        "zh": "预算 {text} 没有意义；请写 1% 到 100%",
    },
    "budget.unread": {
        "en": "cannot read the budget {text}; write a size (4GB, 4GiB), a share (80%) or auto",
        "zh": "看不懂预算 {text}；请写大小（4GB、4GiB）、比例（80%）或 auto",
    },
    "budget.nothing": {
        "en": "a budget of {text} leaves no memory; write a size such as 4GB",
        "zh": "预算 {text} 没有留下任何显存；请写一个大小，例如 4GB",
    },
}

_CONFIG: Mapping[str, Mapping[str, str]] = {
    "split": {
        "en": "--validation-split is {share}; write a share between 0 and 1, such as 0.1",
        "zh": "--validation-split 是 {share}；请写 0 到 1 之间的比例，例如 0.1",
    },
    "length": {
        "en": "--max-length is {length}; write at least 2",
        "zh": "--max-length 是 {length}；请写至少 2",
    },
    "freeze": {
        "en": "--freeze is {value}; write encoder, embeddings, or a number of layers",
        "zh": "--freeze 是 {value}；请写 encoder、embeddings 或层数",
    },
    "lora": {
        "en": "--lora is {rank}; write a rank such as 8",
        "zh": "--lora 是 {rank}；请写一个秩，例如 8",
    },
    "lora.freeze": {
        "en": "--lora {rank} and --freeze {freeze} do not go together: LoRA freezes all but its "
        "adapters and the head already; leave --freeze out",
        "zh": "--lora {rank} 与 --freeze {freeze} 不能同时使用：LoRA 已经冻结了除适配器和分类头"
        "以外的全部权重；请去掉 --freeze",
    },
    "exact.allow": {
        "en": "--exact and --allow {allow} exclude each other; choose one",
        "zh": "--exact 与 --allow {allow} 互相排斥；请选一个",
    },
    "plan.allow": {
        "en": "--exact and --allow are for making a plan, and --plan gives one",
        "zh": "--exact 和 --allow 用于制定方案，而 --plan 已给定方案",
    },
    "key.table": {
        "en": "{path}: {key} is a table; write its values under [{key}]",
        "zh": "{path}：{key} 是一张表；请把它的值写在 [{key}] 下面",
    },
    "key.unknown": {
        "en": "{path}: unknown key {key}.{hint}",
        "zh": "{path}：没有 {key} 这个键。{hint}",
    },
    "key.unknown.in": {
        "en": "{path}: unknown key {key} in [{table}].{hint}",
        "zh": "{path}：[{table}] 里没有 {key} 这个键。{hint}",
    },
    "option.unknown": {
        "en": "unknown option {key}.{hint}",
        "zh": "没有选项 {key}。{hint}",
    },
    "option.missing": {
        "en": "no {what} given; see --help for how to name it",
        "zh": "没有给出 {what}；写法见 --help",
    },
    "option.missing.data": {
        "en": "no data file given; see --help for how to name it",
        "zh": "没有给出数据文件；写法见 --help",
    },
    "option.type": {
        "en": "{key} is {value}; it takes a value of type {types}",
        "zh": "{key} 是 {value}；它要的值的类型是 {types}",
    },
    "option.choice": {
        "en": "{flag} is {value}; it is one of {choices}.{hint}",
        "zh": "{flag} 是 {value}；可选的有 {choices}。{hint}",
    },
    "option.takes": {
        "en": "{name} is {value}; it takes {wanted}",
        "zh": "{name} 是 {value}；它应是 {wanted}",
    },
    "option.positive": {
        "en": "{flag} is {value}; write more than 0",
        "zh": "{flag} 是 {value}；请写大于 0 的数",
    },
    "option.epochs": {
        "en": "--epochs (num_train_epochs) is {value}; write more than 0, such as 3",
        "zh": "--epochs（num_train_epochs）是 {value}；请写大于 0 的数，例如 3",
    },
    "option.count": {
        "en": "{flag} ({name}) is {value}; write 1 or more",
        "zh": "{flag}（{name}）是 {value}；请写 1 或更大的数",
    },
    "option.metric": {
        "en": "--metric-for-best-model is {value}; this task's are {known}.{hint}",
        "zh": "--metric-for-best-model 是 {value}；这个任务的指标有 {known}。{hint}",
    },
    "arguments": {
        "en": "TrainingArguments refuses what was given: {reason}",
        "zh": "TrainingArguments 不接受给出的参数：{reason}",
    },
    "names.type": {
        "en": "label_names is {value}; write label=name, such as 0=negative",
        "zh": "label_names 是 {value}；请写 标签=名称，例如 0=负面",
    },
    "names.item": {
        "en": "label_names has {value}; write label=name, such as 0=negative",
        "zh": "label_names 里有 {value}；请写 标签=名称，例如 0=负面",
    },
    "seed": {
        "en": "{flag} is {seed}; write a whole number from 0 to {most}",
        "zh": "{flag} 是 {seed}；请写 0 到 {most} 的整数",
    },
    "toml.unread": {
        "en": "cannot read the configuration {path}: {reason}",
        "zh": "无法读取配置文件 {path}：{reason}",
    },
    "toml.broken": {
        "en": "{path} is not a TOML file: {reason}",
        "zh": "{path} 不是 TOML 文件：{reason}",
    },
}

_MODELS: Mapping[str, Mapping[str, str]] = {
    "model.file": {
        "en": "the model {model} is a file; give the folder it lies in",
        "zh": "模型 {model} 是一个文件；请给出它所在的文件夹",
    },
    "model.folder": {
        "en": "there is no model folder {model}; check the path",
        "zh": "没有模型文件夹 {model}；请检查路径",
    },
    "model.folder.near": {
        "en": "there is no model folder {model}; did you mean {similar}?",
        "zh": "没有模型文件夹 {model}；你是不是要写 {similar}？",
    },
    "model.adapter": {
        "en": "the folder {folder} holds a LoRA adapter only; merge it into its model first",
        "zh": "文件夹 {folder} 里只有 LoRA 适配器；请先把它合并到模型里",
    },
    "model.config": {
        "en": "the model folder {folder} has no config.json; give the folder that "
        "save_pretrained wrote, or download the model's files into it",
        "zh": "模型文件夹 {folder} 里没有 config.json；请给出 save_pretrained 写出的文件夹，"
        "或把模型文件下载到这里",
    },
    "model.weights": {
        "en": "the model folder {folder} has no weights; it needs model.safetensors or "
        "pytorch_model.bin, or --from-scratch to train from random weights",
        "zh": "模型文件夹 {folder} 里没有权重；需要 model.safetensors 或 pytorch_model.bin，"
        "或用 --from-scratch 从随机权重开始训练",
    },
    "model.weights.foreign": {
        "en": "the model folder {folder} has no weights ({foreign} is not PyTorch's); it needs "
        "model.safetensors or pytorch_model.bin, or --from-scratch to train from random weights",
        "zh": "模型文件夹 {folder} 里没有权重（{foreign} 不是 PyTorch 的）；需要 model.safetensors "
        "或 pytorch_model.bin，或用 --from-scratch 从随机权重开始训练",
    },
    "model.tokenizer": {
        "en": "the model {model} has no tokenizer; put its vocabulary "
        "(tokenizer.json or vocab.txt) beside config.json",
        "zh": "模型 {model} 没有分词器；请把词表（tokenizer.json 或 vocab.txt）放到 "
        "config.json 旁边",
    },
    "model.padding": {
        "en": "the tokenizer of {model} has no padding token; add a pad_token to its "
        "tokenizer_config.json",
        "zh": "{model} 的分词器没有填充符；请在它的 tokenizer_config.json 里加上 pad_token",
    },
    "model.vocabulary": {
        "en": "the tokenizer of {model} knows {known} tokens but the model embeds {embedded}; "
        "they do not belong together",
        "zh": "{model} 的分词器有 {known} 个词元，而模型只嵌入 {embedded} 个；两者不配套",
    },
    "model.shape": {
        "en": "the weights of {model} do not match its config.json: {name} has another shape",
        "zh": "{model} 的权重与它的 config.json 不符：{name} 的形状不同",
    },
    "model.positions": {
        "en": "max_length {length} is beyond the {limit} positions of {model}; write "
        "--max-length {limit} or less",
        "zh": "max_length {length} 超过了 {model} 的 {limit} 个位置；"
        "请写 --max-length {limit} 或更小",
    },
    "model.code": {
        "en": "{model} needs code of its own; --trust-remote-code runs it, at your risk",
        "zh": "{model} 需要运行自带的代码；--trust-remote-code 会运行它，风险自负",
    },
    "model.unknown": {
        "en": "the model {model} is of a type this transformers does not know{kind}",
        "zh": "模型 {model} 的类型是当前 transformers 不认识的{kind}",
    },
    "model.headless": {
        "en": "the model {model} is of a type that has no text classifier{kind}",
        "zh": "模型 {model} 的类型没有文本分类器{kind}",
    },
    "model.hub": {
        "en": "cannot get the model {model}: {reason}",
        "zh": "无法获取模型 {model}：{reason}",
    },
    "model.hub.tokenizer": {
        "en": "cannot get the tokenizer {model}: {reason}",
        "zh": "无法获取分词器 {model}：{reason}",
    },
    "model.hub.parts": {
        "en": "the cache holds only parts of it, and the hub {why}",
        "zh": "缓存里只有一部分，而 hub {why}",
    },
    "model.hub.nowhere": {
        "en": "there is no folder of that name, and the hub {why}",
        "zh": "没有这个名字的文件夹，而 hub {why}",
    },
    "model.hub.none": {
        "en": "has none, or does not let you read it",
        "zh": "上没有它，或不允许你读取",
    },
    "model.load": {
        "en": "cannot load the model of {model}: {reason}",
        "zh": "无法加载 {model} 的模型：{reason}",
    },
    "model.load.tokenizer": {
        "en": "cannot load the tokenizer of {model}: {reason}",
        "zh": "无法加载 {model} 的分词器：{reason}",
    },
}

_OUTPUT: Mapping[str, Mapping[str, str]] = {
    "output.none": {
        "en": "no output folder given; name one with --output-dir",
        "zh": "没有给出输出文件夹；请用 --output-dir 指定",
    },
    "output.run": {
        "en": "the output folder {folder} already holds another run; name another --output-dir, "
        "or continue it with --resume",
        "zh": "输出文件夹 {folder} 里已有另一次训练；请换一个 --output-dir，或用 --resume 继续它",
    },
    "output.files": {
        "en": "the output folder {folder} already holds files ({names}); name another --output-dir",
        "zh": "输出文件夹 {folder} 里已有文件（{names}）；请换一个 --output-dir",
    },
    "output.file": {
        "en": "the output folder {folder} is or lies under a file; name another --output-dir",
        "zh": "输出文件夹 {folder} 是一个文件，或位于文件之下；请换一个 --output-dir",
    },
    "output.unread": {
        "en": "cannot read the output folder {folder}: {reason}; name another --output-dir",
        "zh": "无法读取输出文件夹 {folder}：{reason}；请换一个 --output-dir",
    },
    "output.unwritten": {
        "en": "cannot write to the output folder {folder}: {reason}; "
        "name another with --output-dir",
        "zh": "无法写入输出文件夹 {folder}：{reason}；请用 --output-dir 换一个",
    },
    "output.unfinished": {
        "en": "there is no {name} in {folder}; name the output folder of a finished run",
        "zh": "{folder} 里没有 {name}；请给出已完成训练的输出文件夹",
    },
    "resume.none": {
        "en": "there is no run to resume in {folder}; leave --resume out to start one",
        "zh": "{folder} 里没有可以继续的训练；去掉 --resume 即可开始新的训练",
    },
    "resume.none.named": {
        "en": "there is no run to resume in {folder}; leave --resume out to start one, "
        "or name the folder of the interrupted run with --output-dir",
        "zh": "{folder} 里没有可以继续的训练；去掉 --resume 即可开始新的训练，"
        "或用 --output-dir 指定中断的那次训练的文件夹",
    },
    "resume.unnamed": {
        "en": "name the run to resume with --output-dir",
        "zh": "请用 --output-dir 指定要继续的训练",
    },
    "resume.changed": {
        "en": "--resume continues the run in {folder} as it was begun, but now {changed}; "
        "leave that out, or start anew in another --output-dir",
        "zh": "--resume 按 {folder} 里开始时的设置继续，但现在 {changed}；"
        "请去掉这些改动，或换一个 --output-dir 重新开始",
    },
    "unwritten": {
        "en": "the run could not be written: {why}",
        "zh": "训练结果无法写入：{why}",
    },
}

MESSAGES: Mapping[str, Mapping[str, str]] = {**_GENERAL, **_CONFIG, **_MODELS, **_OUTPUT}
