"""Check a stored run again: its texts with the target's tokenizer, its scores with the installed scorers.

Nothing is downloaded: without the target's tokenizer on this disk, texts are not checked, with a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from dflash_bench.analysis.scores import Flaws, Reread, rescored
from dflash_bench.core.errors import UserError
from dflash_bench.models import hub, presets
from dflash_bench.report import answers as report_answers
from dflash_bench.results import row_checks
from dflash_bench.results.row_checks import Decode
from dflash_bench.results.table import RunTable

COLUMNS = tuple(
    """
    suite prompt_id method turn repeat token_ids text error num_thinking_tokens num_thinking_chars
    """.split()
)


def reread(results: RunTable, rescore: bool | None) -> Reread:
    """Check all texts of a run, and if these are right, its scores (`rescored`, which says what it raises)."""
    texts = _decoded_again(results)
    scores = Reread((), ()) if texts.flaws else rescored(results, rescore)
    return Reread(texts.flaws + scores.flaws, texts.notes + scores.notes)


def _decoded_again(results: RunTable) -> Reread:
    """Decode the tokens of all answers again."""
    tokenizer = next((path for path in _tokenizers(results) if path.is_file()), None)
    if tokenizer is None:
        return Reread((), ("texts were not checked: the target's tokenizer is not on this disk",))
    fast = report_answers.read_tokenizer(tokenizer)
    flaws, num_other = Flaws(results), 0
    slow = cache(lambda: _slow_decoder(tokenizer))  # takes longer to load than most parts to decode
    for batch, names in flaws.rows(COLUMNS):
        other, is_certain = _other(
            batch, lambda ids: [str(text) for text in fast.decode_batch(ids, skip_special_tokens=True)], slow
        )
        num_other += is_certain * len(other)
        for at in other:
            (row,) = batch.slice(at, 1).to_pylist()
            if row["error"] is None:
                flaws.add("text", row, names[at], row_checks.OTHER)
    if num_other and not _is_same_target(results, tokenizer):
        return Reread((), ("texts were not checked: the tokenizer on this disk is of other weights than the run's",))
    return Reread(flaws.problems(), ())


def _tokenizers(results: RunTable) -> Iterator[Path]:
    name = results.info.options.model
    if name in presets.table() and not results.info.options.target:
        yield Path(presets.table()[name].target) / "tokenizer.json"
    for path in report_answers.known(results.info):
        if path.name == "tokenizer.json":
            yield path


def _other(batch: Any, decode: Decode, slow_decoder: Callable[[], Decode | None]) -> tuple[list[int], bool]:
    """Return the rows whose text is wrong by both the tokenizer's file and transformers, which reads more files.

    And whether there was this second opinion.
    """
    if not (rows := row_checks.other(batch, decode)):
        return [], False
    if (slow := slow_decoder()) is None:
        return rows, False
    return [rows[at] for at in row_checks.other(batch.take(rows), slow)], True


def _slow_decoder(tokenizer: Path) -> Decode | None:
    """Return the decoder of transformers; None without torch."""
    states = [(path, path.stat()) for path in sorted(tokenizer.parent.iterdir())]
    return _decoder_of(tokenizer.parent, tuple((path, at.st_ino, at.st_size, at.st_mtime_ns) for path, at in states))


@lru_cache(maxsize=1)
def _decoder_of(folder: Path, _: object) -> Decode | None:
    """Return the decoder of a folder whose files have this state; several runs in one check share it."""
    try:
        from dflash_bench.models.chat import decoder

        return decoder(folder)
    except (ImportError, UserError):
        return None


def _is_same_target(results: RunTable, tokenizer: Path) -> bool:
    """Return whether the weights next to the tokenizer are the run's. Slow, so used only where texts differ."""
    then = str(results.info.identity.revisions.get("target"))
    return "@" in then or then == hub.weights_sha256(tokenizer.parent)
