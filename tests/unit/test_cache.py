"""What was measured here is remembered between runs, and nothing depends on it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memfit.config.files import cache_folder, remember, remembered


def test_the_folder_is_the_users_choice_or_the_systems(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MEMFIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == tmp_path / "xdg" / "memfit"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache_folder() == tmp_path / ".cache" / "memfit"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "Local"))
    assert cache_folder() == tmp_path / "Local" / "memfit" / "cache"
    monkeypatch.setenv("MEMFIT_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"


def test_what_is_remembered_is_read_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "new" / "cache"))
    assert remembered("speeds.json") is None
    remember("speeds.json", {"fp32": 1.5})
    assert remembered("speeds.json") == {"fp32": 1.5}


@pytest.mark.parametrize("damage", ["", "{", "[1]", "\0"])
def test_damaged_files_are_as_good_as_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str
) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    (tmp_path / "speeds.json").write_text(damage, encoding="utf-8")
    assert remembered("speeds.json") is None


def test_a_folder_that_cannot_be_written_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "file" / "cache"))
    remember("speeds.json", {"fp32": 1.5})
    assert remembered("speeds.json") is None
