"""Shards partition the prompts, each with both orders of methods, and interleave to the original order."""

from __future__ import annotations

import pytest

from dflash_bench.core.errors import UserError
from dflash_bench.core.shard import Shard, parse, whole
from helpers.each import each


@each(("num", "of"), [(num, of) for of in (1, 2, 3, 8) for num in (2 * of, 2 * of + 1, 2 * of + 3, 50)])
def test_parts_make_the_whole(num: int, of: int) -> None:
    prompts = [*range(num)]
    parts = [Shard(number, of).part(prompts) for number in range(1, of + 1)]
    assert whole(parts) == prompts
    assert all({prompt % 2 for prompt in part} == {0, 1} for part in parts)


def test_what_is_not_all_shards_of_one_is_no_whole() -> None:
    with pytest.raises(ValueError, match="not the shards"):
        whole([[0, 1, 2, 3, 4, 5], [6, 7]])


@each("text", ["", "1", "0/2", "3/2", "1/0", "1/2/3", "a/b", "-1/2", "1/10001", "1/99999999"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="takes I/N"):
        parse(text)


def test_a_shard_is_shown_as_it_is_given() -> None:
    assert str(parse("2/8")) == "2/8"
