"""Runs the Python blocks of a tutorial with only imports and local paths changed.

The blocks are read from the folder of tutorials beside the checkout; none of their text lives here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
_OUTPUT = re.compile(r"^#==output==.*", re.DOTALL | re.MULTILINE)

# What a notebook has imported before its first cell, with memfit in the place of the two classes
# and of the metrics package.
IMPORTS = """
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers import DataCollatorWithPadding
from memfit import BudgetTrainer as Trainer
from memfit import TrainingArguments
from memfit.records import evaluation as evaluate
"""


def python_blocks(tutorial: Path) -> list[str]:
    """Every Python block, without the printed output some blocks end with."""
    text = tutorial.read_text(encoding="utf-8")
    return [_OUTPUT.sub("", block) for block in _BLOCK.findall(text)]


@dataclass
class Notebook:
    """One namespace in which blocks run one after the other, as cells do."""

    model: Path
    table: Path
    names: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        exec(IMPORTS, self.names)

    def run(self, block: str) -> None:
        exec(compile(self.localised(block), "<tutorial>", "exec"), self.names)

    def localised(self, block: str) -> str:
        """Imports and local paths changed, nothing else.

        One tutorial marks what changed with a star (`batch_size=*32`), which is typography.
        """
        block = re.sub(r"=\*(?=[\dA-Z])", "=", block)
        block = re.sub(r"^from transformers import .*Trainer.*$", "", block, flags=re.MULTILINE)
        block = re.sub(r"^import evaluate$", "", block, flags=re.MULTILINE)
        block = re.sub(
            r"""(['"])(google-bert/bert-base-chinese|hfl/rbt3)\1""", repr(str(self.model)), block
        )
        return re.sub(r"""(['"])(\./)?ChnSentiCorp_htl_all\.csv\1""", repr(str(self.table)), block)
