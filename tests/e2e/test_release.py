"""What is released: a wheel and an sdist that install and work, and an import that is quick."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "src",
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
)
SHIPPED = (
    "memfit/py.typed",
    "memfit/memory/cards.toml",
    "memfit/report/timeline.html",
    "memfit/doctor/well_known.toml",
    "memfit/report/page.html",
    "memfit/report/page.css",
    "memfit/locale/zh_CN/LC_MESSAGES/memfit.mo",
)


def call(*command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """Runs it and returns its output; what failed is shown."""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, made from the sdist, and the sdist, made from the sources alone."""
    folder = tmp_path_factory.mktemp("release")
    source, target = folder / "source", folder / "dist"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.mo")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", target, source)
    return target


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("memfit-*-py3-none-any.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment: the wheel, and this environment's other packages."""
    folder = tmp_path_factory.mktemp("installed") / "env"
    venv.create(folder, with_pip=False)
    programs = folder / ("Scripts" if sys.platform == "win32" else "bin")
    python = programs / "python"
    call(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index",
        "--quiet", "--disable-pip-version-check", wheel,
    )  # fmt: skip
    own = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # Paths in a .pth come after the environment's own, and their .pth files are not read: the
    # editable memfit of this environment stays out of it.
    (Path(own) / "others.pth").write_text(sysconfig.get_path("purelib"))
    return programs


def test_the_wheel_holds_the_package_and_its_files_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in SHIPPED if name not in names] == []
    tops = {name.split("/")[0] for name in names}
    assert len(tops) == 2, tops
    assert "memfit" in tops
    endings = {Path(name).suffix for name in names if name.startswith("memfit/")}
    assert endings <= {".py", ".toml", ".html", ".css", ".js", ".json", ".md", ".typed", ".mo"}
    sources = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "memfit").rglob("*.py")
    }
    assert sources <= set(names)


def test_the_sdist_is_enough_to_build_from_and_carries_the_licence(built: Path) -> None:
    (sdist,) = built.glob("memfit-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "src/memfit/__init__.py"} <= names
    assert "src/memfit/locale/zh_CN/LC_MESSAGES/memfit.po" in names
    assert [name for name in names if name.endswith((".safetensors", ".csv", ".parquet"))] == []


def test_the_extras_are_those_the_documents_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    extras = {line.split(": ")[1] for line in lines if line.startswith("Provides-Extra")}
    assert extras == {
        "dev", "docs", "excel", "gpu", "lora", "modelscope", "onnx", "report", "serve",
    }  # fmt: skip
    assert "License-Expression: Apache-2.0" in lines
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"Requires-Python: {project['requires-python']}" in lines


def test_the_installed_package_is_the_wheels(installed: Path) -> None:
    where = call(installed / "python", "-c", "import memfit; print(memfit.__file__)").strip()
    assert Path(where).is_relative_to(installed.parent)


def test_the_command_starts_and_knows_its_version(installed: Path) -> None:
    from memfit._version import __version__

    help_text = call(installed / "memfit", "--help")
    for command in ("train", "estimate", "predict", "evaluate", "report", "doctor"):
        assert f" {command} " in help_text
    chinese = call(installed / "memfit", "--help", "--lang", "zh", PYTHONIOENCODING="utf-8")
    assert "在你现有的设备内存里微调 transformer 文本分类模型。" in chinese
    assert call(installed / "memfit", "--version").strip() == f"memfit {__version__}"


def test_it_trains_and_predicts_and_finds_its_environment_in_order(
    installed: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    rows = [f"{n % 2},{('服務人員都不親切', '服務人員都很親切')[n % 2]}" for n in range(40)]
    (tmp_path / "reviews.csv").write_text("label,review\n" + "\n".join(rows), encoding="utf-8")
    # One command after the other in one process: torch is imported once.
    commands = [
        ["train", "reviews.csv", "--model", str(tiny_model_dir), "--output-dir", "run",
         "--max-length", "64", "--max-steps", "2", "--batch-size", "8", "--budget", "1GB",
         "--exact", "--quiet"],
        ["predict", "run", "服務人員", "--json"],
        ["doctor", "--json", "--no-table"],
        ["estimate", "--model", str(tiny_model_dir), "--max-length", "64", "--gpu", "T4",
         "--timeline", "step.html"],
    ]  # fmt: skip
    script = (
        "import json, sys; from memfit.cli import run\n"
        "for words in json.loads(sys.argv[1]): assert run(words) == 0; print(sys.argv[2])"
    )
    mark = "---- done ----"
    printed = call(installed / "python", "-c", script, json.dumps(commands), mark, cwd=tmp_path)
    _, predicted, found, _, rest = printed.split(f"{mark}\n")
    assert rest == ""
    assert (tmp_path / "run" / "report.html").is_file()
    (answer,) = json.loads(predicted)
    assert answer["label"] in ("0", "1")
    environment = json.loads(found)
    assert environment["works"] is True
    assert environment["packages"]["torch"]["wanted"] == ">=2.11"
    required = [one for one in environment["packages"].values() if one["required"]]
    assert not any(one["lacking"] for one in required)
    assert (tmp_path / "step.html").is_file()


def test_importing_memfit_imports_no_torch_and_takes_no_longer_than_torch() -> None:
    script = "import memfit, sys; assert 'torch' not in sys.modules; assert memfit.__all__"
    call(sys.executable, "-c", script)

    def seconds(module: str) -> float:
        started = time.perf_counter()
        call(sys.executable, "-c", f"import {module}")
        return time.perf_counter() - started

    # Taken in turn, so that whatever else the machine does falls on both.
    times = [(seconds("torch"), seconds("memfit")) for _ in range(2)]
    torch_seconds, memfit_seconds = map(min, zip(*times, strict=True))
    assert memfit_seconds <= 1.2 * torch_seconds
