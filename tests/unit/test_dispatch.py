"""Which implementation computes: said once, refused on demand."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator

import pytest
import torch

from megarl.ops import dispatch


@pytest.fixture
def without_extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    dispatch._load.cache_clear()
    dispatch.has_extension.cache_clear()
    yield
    dispatch._load.cache_clear()
    dispatch.has_extension.cache_clear()


def test_a_missing_extension_is_said_once(without_extension: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert dispatch.choose_implementation(require_extension=False) == "plain torch"
        assert not dispatch.has_extension()
    assert len(caplog.records) == 1
    assert "No module named 'megarl._C'" in caplog.text
    assert "build_ext --inplace" in caplog.text


def test_a_missing_extension_is_refused_where_it_is_required(without_extension: None) -> None:
    with pytest.raises(ValueError, match=r"ops.require_extension=true, but .*No module named 'megarl._C'"):
        dispatch.choose_implementation(require_extension=True)


def test_an_extension_of_another_edition_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "OPS_VERSION", dispatch.OPS_VERSION + 1)
    dispatch._load.cache_clear()
    try:
        with pytest.raises(ValueError, match="is of edition"):
            dispatch.choose_implementation(require_extension=True)
    finally:
        monkeypatch.undo()
        dispatch._load.cache_clear()


def test_the_extension_says_its_edition() -> None:
    assert dispatch.has_extension()
    assert torch.ops.megarl.version() == dispatch.OPS_VERSION
