"""The help in Chinese, by its English: that stands beside the option it explains.

Every text of every command is here and nothing else (tests/unit/test_cli_help.py). Imported only
where Chinese help is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping

_COMMANDS: Mapping[str, str] = {
    "Fine-tune a transformer text classifier inside the memory you have.": (
        "在你现有的显存里微调 transformer 文本分类模型。"
    ),
    "memfit COMMAND --help tells more about a command.": (
        "memfit 命令 --help 显示该命令的详细说明。"
    ),
    "Fine-tune a classifier on a table of texts and labels.": "用一张文本和标签的表微调分类模型。",
    "Every field of transformers' TrainingArguments is an option under its own name, with dashes "
    "or underscores: --learning-rate 3e-5, --bf16, --no-bf16, --optim adafactor; --batch-size and "
    "--epochs are short for --per-device-train-batch-size and --num-train-epochs.": (
        "transformers 的 TrainingArguments 的每个字段都是同名选项，连字符或下划线均可："
        "--learning-rate 3e-5、--bf16、--no-bf16、--optim adafactor；--batch-size 和 --epochs 是 "
        "--per-device-train-batch-size 和 --num-train-epochs 的简写。"
    ),
    "Plan a training inside a budget: each decision and its reason, memory and time.": (
        "在预算内规划训练：每个决定及其理由、显存和时间。"
    ),
    "Every option of memfit train is one of memfit plan, and what you set is kept. The plan is a "
    "file: edit it, commit it, train by it with memfit train --plan plan.toml, and see whether it "
    "still fits with memfit plan --check plan.toml (exit code 3 where it does not).": (
        "memfit train 的选项 memfit plan 都有，你设置的都会保留。方案是一个文件：可以编辑、提交，"
        "用 memfit train --plan plan.toml 按它训练，用 memfit plan --check plan.toml "
        "检查它是否仍放得下（放不下时退出码为 3）。"
    ),
    "Accuracy, F1, precision and recall per class, and the confusion matrix.": (
        "准确率、各类别的 F1、精确率和召回率，以及混淆矩阵。"
    ),
    "Label sentences, or every row of a file.": "给句子或文件的每一行打标签。",
    "Predict the memory of training with the stock Trainer, from a config.json alone.": (
        "只凭 config.json 预测用原版 Trainer 训练需要的显存。"
    ),
    "It answers for the stock Trainer with these flags and any of TrainingArguments' under its "
    "own name: --optim adafactor, --bf16, --fp16, --gradient-checkpointing, "
    "--gradient-accumulation-steps 8, --eval-batch-size 64.": (
        "针对原版 Trainer，可用以上选项和 TrainingArguments 的任何同名字段：--optim adafactor、"
        "--bf16、--fp16、--gradient-checkpointing、--gradient-accumulation-steps 8、"
        "--eval-batch-size 64。"
    ),
    "Versions, the GPU, what is missing for which strategy, and what the card can train.": (
        "版本、显卡、各策略缺什么，以及这张卡能训练什么。"
    ),
    "Write report.html from a run's files and say where it is.": (
        "根据一次训练留下的文件写出 report.html，并说明它在哪里。"
    ),
    "Upload model, tokenizer and a model card; texts of the data stay here.": (
        "上传模型、分词器和模型卡；数据里的文本不会上传。"
    ),
    "Log in to a hub; in a pipe the token is read from the input, never from an option.": (
        "登录 hub；在管道里从标准输入读取令牌，从不用选项传递。"
    ),
    "Measure the usual memory savings one by one, and memfit's plans, on your machine.": (
        "在你的机器上逐级实测常用的省显存办法和 memfit 的方案。"
    ),
    "Rungs: baseline, accumulation, checkpointing, adafactor, frozen, tuned, shorter, plan; each "
    "on top of the ones before. TrainingArguments' fields are options under their own names: "
    "--batch-size 32, --epochs 2, --learning-rate 2e-5. Results go to ./ladder or --output-dir; "
    "the same command again goes on where it was stopped.": (
        "梯级：baseline、accumulation、checkpointing、adafactor、frozen、tuned、shorter、plan；"
        "每一级都叠加在前面各级之上。TrainingArguments 的字段是同名选项：--batch-size 32、"
        "--epochs 2、--learning-rate 2e-5。结果写入 ./ladder 或 --output-dir；"
        "再运行同一条命令会从中断处继续。"
    ),
}

_RUN: Mapping[str, str] = {
    "Show the version and exit.": "显示版本并退出。",
    "Show this message and exit.": "显示本说明并退出。",
    "en or zh, before or after the command; else the locale's.": (
        "en 或 zh，写在命令前后均可；不写则按系统语言。"
    ),
    "A CSV, TSV, JSONL or Parquet file, or a Hub dataset id.": (
        "CSV、TSV、JSONL 或 Parquet 文件，或 Hub 数据集的 id。"
    ),
    "A CSV, TSV, JSONL or Parquet file, or a Hub dataset id; of several, each is trained on into "
    "a folder of its own in --output-dir.": (
        "CSV、TSV、JSONL 或 Parquet 文件，或 Hub 数据集的 id；给出多个时逐个训练，"
        "各自写入 --output-dir 里的一个文件夹。"
    ),
    "A TOML file with any of these; options win over it.": (
        "含有这些设置的 TOML 文件；命令行选项优先。"
    ),
    "Go on with the run that --output-dir holds.": "继续 --output-dir 里的训练。",
    "Serve the report on localhost while it trains.": "训练时在 localhost 上提供报告页面。",
    "Print JSON on stdout; all else on stderr.": "在 stdout 输出 JSON；其余输出到 stderr。",
    "Print the result only.": "只显示结果。",
    "Plan and measure anew, whatever earlier runs have found out.": (
        "重新测量、重新制定方案，不用以前运行留下的结果。"
    ),
    "The folder the result is written to.": "写入结果的文件夹。",
    "Device memory: 4GB, 4GiB, 80% or auto.": "可用的设备显存：4GB、4GiB、80% 或 auto。",
    "A plan.toml to train by, as memfit plan wrote it.": (
        "按这个 plan.toml 训练，由 memfit plan 写出。"
    ),
    "Only plans that change no number but by rounding.": "只用除舍入误差外不改变数值的方案。",
    "What plans may change besides: any of optimizer,lora,freeze,truncate.": (
        "还允许方案改变什么：optimizer,lora,freeze,truncate 中的任意几项。"
    ),
    "What a loss that is not a finite number does: stop the run, or skip the update.": (
        "损失不是有限数时怎么办：stop 停止训练，skip 跳过这次更新。"
    ),
    "A card by name ('RTX 3050 4GB', T4) or cpu; yours if none.": (
        "显卡名（'RTX 3050 4GB'、T4）或 cpu；不写则用本机的。"
    ),
    "Write the plan here, as TOML.": "把方案写到这个 TOML 文件。",
    "A plan.toml: does it still fit? Changes nothing.": (
        "检查一个 plan.toml 是否仍放得下；不改动任何东西。"
    ),
}

_MODEL_AND_DATA: Mapping[str, str] = {
    "A hub id, modelscope:org/name, or a folder with the model's files.": (
        "hub 上的 id、modelscope:org/name，或存放模型文件的文件夹。"
    ),
    "Train from random weights.": "从随机权重开始训练。",
    "Weights that do not learn: encoder, embeddings, or a number of layers.": (
        "不参与训练的权重：encoder、embeddings 或层数。"
    ),
    "Train LoRA adapters of this rank only.": "只训练这个秩的 LoRA 适配器。",
    "One of eager, sdpa, flash_attention_2, flash_attention_3, flex_attention.": (
        "注意力实现：eager、sdpa、flash_attention_2、flash_attention_3、flex_attention 之一。"
    ),
    "The weights' type: float32, bfloat16, float16 (float32 if not given).": (
        "权重的类型：float32、bfloat16、float16（不写则为 float32）。"
    ),
    "Run code that comes with the model.": "运行模型自带的代码。",
    "A separate validation table.": "单独的验证表。",
    "The column of texts; found by name if not given.": "文本所在的列；不写则按列名查找。",
    "The column of texts.": "文本所在的列。",
    "The second text of a pair.": "句对中第二段文本的列。",
    "The pair's second text.": "句对中第二段文本的列。",
    "The column of labels, or several separated by commas; found by name if not given.": (
        "标签所在的列，多列用逗号分隔；不写则按列名查找。"
    ),
    "Names for the labels: 0=negative 1=positive.": "标签的名称，例如 0=负面 1=正面。",
    "One of auto, single_label, multi_label, regression.": (
        "任务：auto、single_label、multi_label、regression 之一。"
    ),
    "The share of rows held out to validate.": "留作验证的行所占的比例。",
    "Texts longer than this many tokens are cut.": "超过这么多词元的文本会被截断。",
    "The file's encoding; found if not given.": "文件的编码；不写则自动识别。",
    "The file's encoding.": "文件的编码。",
    "The seed of the split (and of the training).": "划分数据（和训练）的随机种子。",
    "An output folder or a hub id.": "输出文件夹或 hub 上的 id。",
    "A table of texts and labels.": "文本和标签的表。",
    "Cut texts here; where the training did if not given.": (
        "文本截断到多少个词元；不写则与训练时相同。"
    ),
    "The sentences to label.": "要打标签的句子。",
    "A table of texts instead: CSV, TSV, JSONL, Parquet.": (
        "改为给出一张文本表：CSV、TSV、JSONL、Parquet。"
    ),
    "Write the file's rows with label and score here: .csv, .tsv, .jsonl.": (
        "把文件各行连同标签和得分写到这里：.csv、.tsv、.jsonl。"
    ),
}

_OTHERS: Mapping[str, str] = {
    "Rows on the device at once.": "一次放上设备的行数。",
    "Tokens a row, padding included.": "每行的词元数，含填充。",
    "Whether batches hold padding; so they do with more than one row.": (
        "批次里是否有填充；多于一行时默认有。"
    ),
    "Outputs of the classification head.": "分类头的输出个数。",
    "single_label, multi_label or regression.": "任务：single_label、multi_label 或 regression。",
    "A card by name ('RTX 3060', T4) or cpu; yours if not given.": (
        "显卡名（'RTX 3060'、T4）或 cpu；不写则用本机的。"
    ),
    "Draw memory over the step as an HTML page here.": (
        "把一步之内的显存变化画成 HTML 页面写到这里。"
    ),
    "Judge for a card by name ('RTX 3060', T4) instead of this machine's.": (
        "针对这张显卡（'RTX 3060'、T4）而不是本机的判断。"
    ),
    "Whether to price the well-known models.": "是否估算常用模型。",
    "The output folder of a run.": "一次训练的输出文件夹。",
    "The repository; made if new.": "仓库；没有则新建。",
    "hub (Hugging Face) or modelscope.": "hub（Hugging Face）或 modelscope。",
    "Only you can see it.": "只有你自己看得到。",
    "The licence others get: apache-2.0, mit, ...; asked for.": (
        "别人得到的许可证：apache-2.0、mit 等；不写会询问。"
    ),
    "Log in anew.": "重新登录。",
    "Steps that are timed, after three to warm up.": "预热三步之后计时的步数。",
    "Only these, by name; the baseline always.": "只测这些梯级（按名称）；baseline 总会测。",
    "What memfit plans for: 4GB, 80%, auto, or half of the baseline.": (
        "memfit 按什么预算做方案：4GB、80%、auto，或 half（基线的一半）。"
    ),
    "Train every rung to its end and compare F1.": "把每一级训练到底并比较 F1。",
    "Trainings a rung, for --quality.": "--quality 时每一级训练的次数。",
    "Measure again what the folder already has.": "重新测量文件夹里已有的结果。",
}

CHINESE: Mapping[str, str] = {**_COMMANDS, **_RUN, **_MODEL_AND_DATA, **_OTHERS}
