"""The bar of what takes a while: only in a terminal, and only once it does take a while."""

from __future__ import annotations

import io

from dflash_bench.core.terminal import with_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_quick_shows_no_bar() -> None:
    stream = Terminal()
    assert list(with_bar("abc", "drawing", stream=stream)) == ["a", "b", "c"]
    assert stream.getvalue() == ""


def test_what_takes_longer_shows_how_far_it_is() -> None:
    stream = Terminal()
    assert list(with_bar("abc", "drawing [plots]", after_s=-1, stream=stream)) == ["a", "b", "c"]
    assert "0/3" in stream.getvalue()
    assert "2/3" in stream.getvalue()
    assert "drawing [plots]" in stream.getvalue()


def test_a_file_gets_no_bar() -> None:
    stream = io.StringIO()
    assert list(with_bar("abc", "drawing", after_s=-1, stream=stream)) == ["a", "b", "c"]
    assert stream.getvalue() == ""
