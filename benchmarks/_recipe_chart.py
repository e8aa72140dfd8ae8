"""The README's picture: the recipe people copy rung by rung, then memfit, predicted and measured.

Plain SVG text, so that the same drawing exists in both languages and follows a dark page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

GIB = 2**30
PARTS = ("weights", "gradients", "optimizer", "activations", "workspace", "context", "unused")
CARDS_GIB = (4, 8)

WIDTH, LEFT, RIGHT = 900, 232, 690
TOP, ROW, BAR = 116, 38, 22

STYLE = """
  text { font: 14px -apple-system, "Segoe UI", "Noto Sans", "PingFang SC", "Microsoft YaHei",
         "Noto Sans CJK SC", sans-serif; fill: #1c2127; }
  .title { font-size: 17px; font-weight: 600; } .quiet { fill: #5b6570; font-size: 12px; }
  .end { text-anchor: end; } .middle { text-anchor: middle; }
  .paper { fill: #ffffff; } .rule { stroke: #d5dae0; } .card { stroke: #5b6570; }
  .mark { stroke: #1c2127; stroke-width: 3; }
  .weights { fill: #2f7fc1; } .gradients { fill: #e3a008; } .optimizer { fill: #1a9b73; }
  .activations { fill: #d4622a; } .workspace { fill: #b0609a; } .context { fill: #8a939c; }
  .unused { fill: #c3cad1; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e9ed; } .quiet { fill: #9aa4af; } .paper { fill: #14181d; }
    .rule { stroke: #39424c; } .card { stroke: #9aa4af; } .mark { stroke: #e6e9ed; }
    .unused { fill: #4b5560; } .context { fill: #78828c; }
  }
"""


@dataclass(frozen=True)
class Words:
    """Everything the picture says, in one language."""

    title: str
    subtitle: str
    measured: str
    step: str
    card: str
    rungs: tuple[str, ...]
    ours: tuple[str, ...]
    parts: Mapping[str, str]
    tick: str
    sources: str

    @property
    def rows(self) -> tuple[str, ...]:
        """The recipe's rungs and then ours."""
        return (*self.rungs, *self.ours)


@dataclass(frozen=True)
class Rung:
    """One run of the recipe: what it was predicted and measured to hold, and its step's time."""

    parts: Mapping[str, int]
    measured_bytes: int
    step_seconds: float


def draw(words: Words, rungs: Sequence[Rung]) -> str:
    """The picture as one SVG file."""
    bottom = TOP + ROW * len(rungs)
    height = bottom + 108
    widest = max(rung.measured_bytes for rung in rungs)
    body = [
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        _text(24, 34, words.title, "title"),
        _text(24, 56, words.subtitle, "quiet"),
        _text(RIGHT + 90, TOP - 18, words.measured, "quiet end"),
        _text(WIDTH - 24, TOP - 18, words.step, "quiet end"),
        *_cards(words, widest, bottom),
    ]
    for index, (label, rung) in enumerate(zip(words.rows, rungs, strict=True)):
        body += _row(label, rung, TOP + ROW * index, widest)
    line = TOP + ROW * len(words.rungs) - (ROW - BAR) // 2
    body.append(f'<line class="rule" x1="24" x2="{WIDTH - 24}" y1="{line}" y2="{line}"/>')
    body += _legend(words, bottom + 34)
    body.append(_text(24, bottom + 90, words.sources, "quiet"))
    lines = "\n".join(f"  {line}" for line in body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(words.title)}">\n'
        f"  <style>{STYLE}  </style>\n{lines}\n</svg>\n"
    )


def _x(count: float, widest: int) -> float:
    return round(LEFT + (RIGHT - LEFT) * count / widest, 1)


def _cards(words: Words, widest: int, bottom: int) -> Iterator[str]:
    """Where the memory of a small card ends."""
    for size in CARDS_GIB:
        x = _x(size * GIB, widest)
        yield _text(x, TOP - 18, words.card.format(size), "quiet middle")
        yield (
            f'<line class="card" x1="{x}" x2="{x}" y1="{TOP - 10}" y2="{bottom}" '
            'stroke-dasharray="3 4"/>'
        )


def _row(label: str, rung: Rung, y: int, widest: int) -> Iterator[str]:
    yield _text(LEFT - 12, y + 16, label, "end")
    at = 0
    for part in PARTS:
        size = rung.parts[part]
        start, stop = _x(at, widest), _x(at + size, widest)
        if stop > start:
            yield (
                f'<rect class="{part}" x="{start}" y="{y}" width="{round(stop - start, 1)}" '
                f'height="{BAR}"/>'
            )
        at += size
    x = _x(rung.measured_bytes, widest)
    yield f'<line class="mark" x1="{x}" x2="{x}" y1="{y - 4}" y2="{y + BAR + 4}"/>'
    yield _text(RIGHT + 90, y + 16, f"{rung.measured_bytes / GIB:.2f} GiB", "end")
    seconds = rung.step_seconds
    time = f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.0f} ms"
    yield _text(WIDTH - 24, y + 16, time, "end")


def _legend(words: Words, y: int) -> Iterator[str]:
    """Two lines of four, so that either language has room."""
    places = [(24 + 214 * (index % 4), y + 24 * (index // 4)) for index in range(len(PARTS) + 1)]
    for part, (x, line) in zip(PARTS, places, strict=False):
        yield f'<rect class="{part}" x="{x}" y="{line - 11}" width="14" height="14"/>'
        yield _text(x + 21, line, words.parts[part], "quiet")
    x, line = places[-1]
    yield f'<line class="mark" x1="{x + 7}" x2="{x + 7}" y1="{line - 13}" y2="{line + 5}"/>'
    yield _text(x + 21, line, words.tick, "quiet")


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(words)}</text>'


ENGLISH = Words(
    title="BERT-Large on a small card: the recipe people copy, and memfit",
    subtitle="Bars: predicted from a config.json, without a GPU. Ticks: measured on an NVIDIA "
    "H200. Effective batch 32, up to 128 tokens.",
    measured="measured",
    step="step",
    card="{} GiB card",
    rungs=(
        "fp32, batch 32, length 128",
        "+ batch 1 × 32 accumulation",
        "+ gradient checkpointing",
        "+ Adafactor",
        "+ frozen encoder",
        "+ length 32",
    ),
    ours=(
        "memfit --budget 4GB",
        "memfit --budget 3GB",
        "memfit --budget 2GB",
    ),
    parts={
        "weights": "weights",
        "gradients": "gradients at the peak",
        "optimizer": "optimizer",
        "activations": "activations",
        "workspace": "library workspaces",
        "context": "CUDA context",
        "unused": "reserved, unused",
    },
    tick="measured on the device",
    sources="memfit's rows train every parameter, clipped by the global norm. Measured by "
    "benchmarks/memory_gpu.py and plan_gpu.py.",
)

CHINESE = Words(
    title="在小显卡上训练 BERT-Large：大家照抄的配方，与 memfit",
    subtitle="色条：只凭 config.json 预测，不需要 GPU。竖线：NVIDIA H200 上的实测值。"
    "有效批大小 32，最长 128 词元。",
    measured="实测显存",
    step="每步用时",
    card="{} GiB 显卡",
    rungs=(
        "fp32，批大小 32，长度 128",
        "+ 批大小 1 × 累积 32",
        "+ 梯度检查点",
        "+ Adafactor",
        "+ 冻结编码器",
        "+ 长度 32",
    ),
    ours=(
        "memfit --budget 4GB",
        "memfit --budget 3GB",
        "memfit --budget 2GB",
    ),
    parts={
        "weights": "权重",
        "gradients": "梯度（峰值时刻）",
        "optimizer": "优化器状态",
        "activations": "激活",
        "workspace": "计算库工作区",
        "context": "CUDA 上下文",
        "unused": "已预留、未使用",
    },
    tick="设备上的实测值",
    sources="memfit 各行训练全部参数，按全局范数裁剪。"
    "实测：benchmarks/memory_gpu.py、plan_gpu.py。",
)
