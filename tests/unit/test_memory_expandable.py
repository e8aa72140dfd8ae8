"""Segments that grow: where memfit's runs have them."""

import sys

import pytest

from memfit.memory.allocator import segments_expand


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has them")
@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_they_are_used_unless_the_user_said_otherwise(variable: str) -> None:
    assert segments_expand({})
    assert segments_expand({variable: "max_split_size_mb:64"})
    assert not segments_expand({variable: "max_split_size_mb:64,expandable_segments:False"})


def test_other_systems_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert not segments_expand({})
