"""Chats answered turn by turn: what is asked later follows the target's own greedy answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_bench.train import answers, chats
from dflash_bench.train.answers import Asked
from dflash_bench.train.preparing import ROW_LENGTH, Prepared, Tell
from dflash_bench.train.rows import stored


def collect(prepared: Prepared, tell: Tell) -> list[Path]:
    """A folder of answers for each turn; a chat ends early where it leaves no room for another answer."""
    tokenizer, folder, asked, going = prepared.models.tokenizer, prepared.answers, prepared.asked, prepared.chats
    folders: list[Path] = []
    while asked:
        report = tell if not folders else _of_turn(tell, len(folders) + 1)
        answers.collect(prepared.target, prepared.stops, asked, prepared.plan, folder, report, prepared.crew)
        folders.append(folder)
        left = [number for number, chat in enumerate(going) if chat.later]
        said = _said(folder, tokenizer) if left else {}
        following = [going[number].continued(said[number]) for number in left]
        kept = chats.fitting(following, tokenizer, ROW_LENGTH)
        asked = tuple(
            Asked(ids, first=asked[left[number]].first or asked[left[number]].ids) for ids, number in kept.items()
        )
        going = tuple(following[number] for number in kept.values())
        folder = prepared.answers.with_name(f"{prepared.answers.name}-{len(folders) + 1}")
    return folders


def _of_turn(tell: Tell, number: int) -> Tell:
    return lambda text: tell(f"turn {number}, {text}")


def _said(folder: Path, tokenizer: Any) -> dict[int, str]:
    """What the target said to each prompt, by its number."""
    return {
        item.prompt_number: tokenizer.decode(item.ids[item.prompt_length :], skip_special_tokens=True)
        for item in stored([folder])
    }
