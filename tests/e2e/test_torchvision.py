"""A torchvision without VideoReader (0.26): the formatters of `datasets` that want it are not used.

Such a package is first on the path and imported: only then it is used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from datasets import Dataset, config
from transformers.utils import is_torchvision_available

from memfit.cli import run
from sentences import write_short_reviews


@pytest.fixture
def torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = tmp_path / "path" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0.26.0"\n')
    # No ImportError: some versions of `datasets` look away then, others end there.
    (package / "io.py").write_text(
        "def __getattr__(name):\n"
        "    raise (AttributeError if name[0] == '_' else RuntimeError)(f'no {name} here')\n"
    )
    is_torchvision_available()  # what is installed decides for transformers, which asks once
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(package.parent)
    for name in ("torchvision", "torchvision.io"):
        importlib.import_module(name)
    monkeypatch.setattr(config, "TORCHVISION_AVAILABLE", True)  # it looked for it when imported
    yield
    for name in ("torchvision", "torchvision.io"):
        del sys.modules[name]


@pytest.mark.usefixtures("torchvision", "undrawn")
def test_a_run_does_without_the_formatters_that_import_it(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    for kind in ("numpy", "torch"):
        # Or this test shows nothing.
        with pytest.raises(RuntimeError, match="VideoReader"):
            Dataset.from_dict({"x": [1, 2]}).with_format(kind)["x"][:]
    table, out = write_short_reviews(tmp_path / "reviews.csv", 40), tmp_path / "out"
    words = ["--max-length", "16", "--batch-size", "8", "--epochs", "1", "--exact", "--quiet"]
    words += ["--model", str(tiny_model_dir), "--output-dir", str(out)]
    assert run(["train", str(table), *words]) == 0
    assert run(["evaluate", str(out), str(table)]) == 0
    assert run(["predict", str(out), "服務人員都很親切"]) == 0
    assert run(["predict", str(out), "--file", str(table), "--output", f"{out}.csv"]) == 0
