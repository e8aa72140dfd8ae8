"""A torchvision without VideoReader (0.26): the formatters of `datasets` that want it are not used.

In a process of its own, with such a package first on the path and imported: only then it is used.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from transformers.utils import is_torchvision_available

package, table, model, out = sys.argv[1:]
is_torchvision_available()  # what is installed decides for transformers, which asks once
sys.path.insert(0, package)
import torchvision
from datasets import Dataset, config
from memfit.cli import run

assert config.TORCHVISION_AVAILABLE
for kind in ("numpy", "torch"):
    try:
        Dataset.from_dict({"x": [1, 2]}).with_format(kind)["x"][:]
    except RuntimeError as error:
        assert "VideoReader" in str(error)
    else:
        raise AssertionError(f"the formatter for {kind} does without it: this test shows nothing")

settings = ["--max-length", "16", "--batch-size", "8", "--epochs", "1", "--exact", "--quiet"]
assert run(["train", table, "--model", model, "--output-dir", out, *settings]) == 0
assert run(["evaluate", out, table]) == 0
assert run(["predict", out, "服務人員都很親切"]) == 0
assert run(["predict", out, "--file", table, "--output", out + ".csv"]) == 0
"""


def test_a_run_does_without_the_formatters_that_import_it(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    package = tmp_path / "path" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0.26.0"\n')
    # No ImportError: some versions of `datasets` look away then, others end there.
    (package / "io.py").write_text(
        "def __getattr__(name):\n"
        "    raise (AttributeError if name[0] == '_' else RuntimeError)(f'no {name} here')\n"
    )
    rows = "".join(f"{row % 2},服務人員都{'不很'[row % 2]}親切 {row}\n" for row in range(40))
    table = tmp_path / "reviews.csv"
    table.write_text(f"label,review\n{rows}", encoding="utf-8")
    words = [package.parent, table, tiny_model_dir, tmp_path / "out"]
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
