"""Compiles the Chinese catalogue when memfit is built; everything else is in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po
from setuptools import setup
from setuptools.command.build_py import build_py

LOCALES = Path(__file__).parent / "src" / "memfit" / "locale"


class BuildWithCatalogues(build_py):
    """Writes a .mo file beside every .po file before package data is collected."""

    def run(self) -> None:
        """Compiles, then builds."""
        for path in LOCALES.rglob("*.po"):
            with path.open("rb") as source, path.with_suffix(".mo").open("wb") as target:
                write_mo(target, read_po(source))
        super().run()


setup(cmdclass={"build_py": BuildWithCatalogues})
