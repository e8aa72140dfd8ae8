"""What a run says on its way, in English and in Chinese."""

from __future__ import annotations

from collections.abc import Mapping

MESSAGES: Mapping[str, Mapping[str, str]] = {
    "line.model": {"en": "model", "zh": "模型"},
    "line.budget": {"en": "budget", "zh": "预算"},
    "line.plan": {"en": "plan", "zh": "方案"},
    "line.batch": {"en": "batch", "zh": "批次"},
    "line.memory": {"en": "memory", "zh": "显存"},
    "line.note": {"en": "note", "zh": "注意"},
    "model": {"en": "{model}, {total} parameters", "zh": "{model}，{total} 个参数"},
    "model.part": {
        "en": "{model}, {total} parameters, {learning} of them learn",
        "zh": "{model}，{total} 个参数，其中 {learning} 个参与训练",
    },
    "budget.less": {
        "en": "{bytes}: all there is, less than the {asked} asked for",
        "zh": "{bytes}：已是全部，少于要求的 {asked}",
    },
    "budget.asked": {"en": "{bytes}, {asked}", "zh": "{bytes}，{asked}"},
    "batch.whole": {
        "en": "{rows} rows a step, all on the device at once",
        "zh": "每步 {rows} 行，一次全部放上设备",
    },
    "batch.rows": {
        "en": "{rows} rows a step, at most {most_rows} rows on the device at once",
        "zh": "每步 {rows} 行，设备上一次至多 {most_rows} 行",
    },
    "batch.tokens": {
        "en": "{rows} rows a step, at most {most_tokens} tokens on the device at once",
        "zh": "每步 {rows} 行，设备上一次至多 {most_tokens} 个词元",
    },
    "batch.both": {
        "en": "{rows} rows a step, at most {most_rows} rows and {most_tokens} tokens on the "
        "device at once",
        "zh": "每步 {rows} 行，设备上一次至多 {most_rows} 行、{most_tokens} 个词元",
    },
    "batch.packed": {
        "en": "{batch}, packed without padding",
        "zh": "{batch}，紧密拼接，不做填充",
    },
    "plan": {"en": "{fidelity}: {strategies}", "zh": "{fidelity}：{strategies}"},
    "plan.kept": {"en": "{plan}; kept from an earlier run", "zh": "{plan}；沿用以前的运行"},
    "memory": {
        "en": "{needs} at the peak by prediction, {share} of the budget",
        "zh": "预测峰值 {needs}，占预算的 {share}",
    },
    "wait.prepare": {"en": "preparing …", "zh": "正在准备……"},
    "wait.libraries": {"en": "loading libraries …", "zh": "正在加载程序库……"},
    "wait.read": {"en": "reading the table …", "zh": "正在读取数据表……"},
    "wait.tokenize": {"en": "tokenizing {rows} rows …", "zh": "正在把 {rows} 行文本转为词元……"},
    "wait.load": {"en": "loading the weights …", "zh": "正在加载权重……"},
    "wait.rehearse": {
        "en": "compiling, capturing and trying the largest batch …",
        "zh": "正在编译、捕获，并试运行最大的批次……",
    },
    "wait.evaluate": {"en": "evaluating {rows} rows …", "zh": "正在评估 {rows} 行……"},
    "wait.checkpoint": {"en": "writing a checkpoint …", "zh": "正在写检查点……"},
    "wait.best": {"en": "loading the best model …", "zh": "正在加载最佳模型……"},
    "wait.save": {"en": "saving the model …", "zh": "正在保存模型……"},
    "wait.report": {"en": "writing the report …", "zh": "正在写报告……"},
    "wait.seconds": {"en": "{what} {seconds} s", "zh": "{what} {seconds} 秒"},
    "wait.took": {"en": "{seconds} s", "zh": "{seconds} 秒"},
    "finished.already": {
        "en": "the run in {folder} has already finished; nothing is left to do",
        "zh": "{folder} 里的训练已经完成，没有要做的了",
    },
    "resuming": {
        "en": "resuming from the last checkpoint, {name}",
        "zh": "从最近的检查点 {name} 继续",
    },
    "resuming.none": {
        "en": "no checkpoint was written yet; starting from the beginning",
        "zh": "还没有写过检查点，从头开始",
    },
    "plan.again": {
        "en": "the rehearsal needed more memory than predicted; planned again with {bytes} less",
        "zh": "预演所需显存超过预测；少用 {bytes} 重新规划",
    },
    "stopped": {
        "en": "stopped at step {step} of {steps}; go on with: {command}",
        "zh": "停在第 {step} 步，共 {steps} 步；继续：{command}",
    },
    "stopping": {
        "en": "stopping after this step; press Ctrl-C again to stop at once",
        "zh": "这一步完成后停止；再按一次 Ctrl-C 立即停止",
    },
    "half.trying": {
        "en": "trying half precision on this CPU, which is done once …",
        "zh": "正在试用这个 CPU 的半精度，只需一次……",
    },
    "half.lowered": {
        "en": "this CPU advertises AMX instructions that it does not run: half precision does "
        "without them ({variable})",
        "zh": "这个 CPU 声称支持 AMX 指令，却不能执行：半精度改用其他指令（{variable}）",
    },
    "half.none": {
        "en": "this CPU advertises half-precision instructions that it does not run: memfit goes "
        "on without {types}",
        "zh": "这个 CPU 声称支持半精度指令，却不能执行：memfit 不使用 {types}",
    },
    "half.late": {
        "en": "this CPU advertises AMX instructions that it does not run, and torch has begun to "
        "use them: memfit goes on without half precision; set {variable} before Python starts "
        "to have it",
        "zh": "这个 CPU 声称支持 AMX 指令，却不能执行，而 torch 已经启用了它们："
        "memfit 不使用半精度；若要使用，请在启动 Python 之前设置 {variable}",
    },
    "half.untried": {
        "en": "whether this CPU runs half precision could not be tried: memfit goes on without it",
        "zh": "无法试用这个 CPU 的半精度：memfit 不使用它",
    },
    "half.weights": {
        "en": "the weights are {dtype}, and {reason}; load them in float32 (leave --dtype out)",
        "zh": "权重是 {dtype}，而{reason}；请以 float32 加载（不要写 --dtype）",
    },
    "interrupted": {"en": "interrupted", "zh": "已中断"},
    "bug": {
        "en": "this should not have happened: {error}\n"
        "This is a bug in memfit: run it again with MEMFIT_DEBUG=1 and report the traceback "
        "in the project's issues",
        "zh": "不该发生的情况：{error}\n"
        "这是 memfit 的错误：请设置 MEMFIT_DEBUG=1 再运行一次，并把 traceback 提交到项目的 issues",
    },
    "bug.silent": {"en": "no message", "zh": "没有说明"},
    "note": {"en": "note: {text}", "zh": "注意：{text}"},
}
