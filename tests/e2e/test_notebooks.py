"""The tutorial notebooks, run cell by cell by a real kernel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
STEPS = (
    "import", "load", "split", "tokenize", "model", "metric", "arguments", "trainer", "train",
    "infer",
)  # fmt: skip
# Jupyter's libraries warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")


def cells_of(path: Path) -> dict[str, dict[str, Any]]:
    return {cell["id"]: cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]}


def text_of(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_there_is_one_in_english_and_one_in_chinese_with_the_same_ten_steps() -> None:
    assert [path.name for path in NOTEBOOKS] == ["tutorial.ipynb", "tutorial.zh.ipynb"]
    english, chinese = (cells_of(path) for path in NOTEBOOKS)
    assert english.keys() == chinese.keys()
    for number, step in enumerate(STEPS, 1):
        assert english[f"{step}-code"]["cell_type"] == "code"
        for cells in (english, chinese):
            assert text_of(cells[step]).startswith(f"## {number}. ")
    for name, cell in english.items():
        said = (text_of(cell), text_of(chinese[name]))
        assert cell["cell_type"] == chinese[name]["cell_type"]
        if cell["cell_type"] == "markdown":
            assert re.search(r"[\u4e00-\u9fff]", said[1])
            assert not re.search(r"[\u4e00-\u9fff]", said[0])
        elif name not in ("install-code", "import-code", "load-code", "model-code", "infer-code"):
            assert said[0] == said[1]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_holds_nothing_of_the_machine_it_was_written_on(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|work|tmp|opt|usr|Users)/", text)
    assert len(text) < 100_000
    for cell in cells_of(path).values():
        assert cell.get("execution_count") is None
        assert cell.get("outputs", []) == []


@pytest.fixture(scope="module")
def executed(
    tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Any, Path]]:
    """Each notebook with its outputs, and the folder it ran in.

    One kernel runs them all, since torch takes seconds to import; before each it forgets every
    name.
    """
    import nbformat
    from nbclient import NotebookClient

    folder = tmp_path_factory.mktemp("notebooks")
    ran, together = {}, nbformat.v4.new_notebook()
    for path in NOTEBOOKS:
        notebook, own = nbformat.read(path, as_version=4), folder / path.stem
        own.mkdir()
        begin = f"%reset -f\nimport os\nos.chdir({str(own)!r})\ndel os"
        together.metadata = notebook.metadata
        together.cells += [nbformat.v4.new_code_cell(begin), *notebook.cells]
        ran[path.stem] = (notebook, own)
    environment = {
        "MEMFIT_TUTORIAL_MODEL": str(tiny_model_dir),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_PLATFORM_DIRS": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        NotebookClient(together, timeout=300).execute()
    return ran


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(
    executed: dict[str, tuple[Any, Path]], path: Path
) -> None:
    notebook, folder = executed[path.stem]
    outputs = {cell["id"]: cell.get("outputs", []) for cell in notebook.cells}
    html = {
        name: "".join(
            str(one["data"]["text/html"]) for one in found if "text/html" in one.get("data", {})
        )
        for name, found in outputs.items()
    }
    spoken = "zh-Hans" if ".zh" in path.name else "en"
    for name in ("trainer-code", "trained-code", "one-code"):
        assert f'lang="{spoken}"' in html[name], name
        assert "memfit-view" in html[name]
    assert "<svg" in html["trained-code"]
    answers = "".join(str(one.get("text", "")) for one in outputs["infer-code"])
    assert answers.count("label") >= 2
    measured = "".join(str(one.get("data", "")) for one in outputs["train-code"])
    assert "eval_f1" in measured
    assert (folder / "run" / "report.html").is_file()


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter as a notebook's machine has it: pip (this environment's), and no memfit."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(
        subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
    )
    for part in Path(sysconfig.get_path("purelib")).glob("pip*"):
        (packages / part.name).symlink_to(part)
    return python


def installed_by(path: Path, python: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """The notebook's first cell, as it stands, where no package index can be reached."""
    source = text_of(cells_of(path)["install-code"]) + "\nimport memfit; print(memfit.__file__)"
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PYTHONUTF8": "1"}
    env.pop("PYTHONPATH", None)
    return subprocess.run(
        [python, "-c", source], capture_output=True, encoding="utf-8", cwd=folder, env=env
    )


def wheel_in(folder: Path) -> None:
    """A wheel of that name which needs nothing else: what is tested is the way to it."""
    about = "Metadata-Version: 2.1\nName: memfit\nVersion: 0.1.0\nProvides-Extra: report\n"
    files = {
        "memfit/__init__.py": "",
        "memfit-0.1.0.dist-info/METADATA": about,
        "memfit-0.1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    listed = "".join(f"{name},,\n" for name in [*files, "memfit-0.1.0.dist-info/RECORD"])
    with zipfile.ZipFile(folder / "memfit-0.1.0-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, "memfit-0.1.0.dist-info/RECORD": listed}.items():
            wheel.writestr(name, text)


def test_where_memfit_cannot_be_had_the_first_cell_says_what_to_do(
    bare_python: Path, tmp_path: Path
) -> None:
    for path, said in zip(NOTEBOOKS, ("upload its wheel", "上传到笔记本旁边"), strict=True):
        done = installed_by(path, bare_python, tmp_path)
        assert done.returncode == 1
        assert done.stdout == ""
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
    wheel_in(tmp_path)
    done = installed_by(NOTEBOOKS[0], bare_python, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "site-packages" in done.stdout


def test_the_repository_of_the_notebooks_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository", "")
    for path in NOTEBOOKS:
        assert f'REPOSITORY = "{address}"' in text_of(cells_of(path)["install-code"])
