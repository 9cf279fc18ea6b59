"""Forged runs are refuted, or what cannot be told of them is named."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dflash_bench as db
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Answer, Generation
from dflash_bench.models import presets
from dflash_bench.models.chat import decoder_of
from dflash_bench.results import pack, recheck, store
from dflash_bench.results.recheck import CheckedPart
from dflash_bench.submissions import accept as accepting
from dflash_bench.submissions.accept import AcceptRequest, accept
from helpers.each import each as cases
from submissions.forging import Info, Rows, each, forge, of_generation, one_after_another, perfect, scaled

DECODE = decoder_of(presets.preset("nano").target, False)
FOREIGN = 77
"""A token that nano would not choose after a question of arithmetic."""


USUAL: dict[str, Any] = {
    "model": "nano",
    "suite": "gsm8k",
    "methods": ["dflash", "ngram"],
    "limit": 4,
    "max_new_tokens": 48,
}
Rechecked = Callable[[Path], dict[str, CheckedPart]]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory, with_shared_models: None) -> Path:
    folder = tmp_path_factory.mktemp("honest") / "run"
    db.run(**USUAL, out=folder)
    return folder


@pytest.fixture(scope="module")
def rechecked(honest: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rechecked]:
    """Packs a run unread, as a forger would, and rechecks all of its answers; returns the findings by check."""
    known: dict[Any, Any] = {}
    sound, measured = accepting.open_local, store.read_info(honest).forwards

    def opened(resolved: Any) -> Any:
        """Open each engine once: what is loaded does not depend on what is forged."""
        at = (resolved.model.target, tuple(map(str, resolved.methods)), resolved.request.dtype, resolved.max_new_tokens)
        if at not in known:
            known[at] = sound(resolved)
        return known[at]

    def findings(run: Path) -> dict[str, CheckedPart]:
        folder = tmp_path_factory.mktemp("rechecked")
        pack.write(run, folder / "pack.zip")
        record = accept(AcceptRequest(folder / "pack.zip", share=1.0, seed=1), folder / "out", lambda _: None)
        assert (folder / "out" / recheck.FILE).exists() == record.is_accepted
        return {one.check: one for one in record.findings}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accepting, "open_local", opened)
        patch.setattr(accepting.Here, "forwards", lambda _: measured)
        patch.setattr(pack, "read_run", lambda _: None)
        yield findings


def test_an_honest_run_is_accepted(honest: Path, rechecked: Rechecked) -> None:
    found = rechecked(honest)
    assert found.pop("times").state in ("unchecked", "doubtful")
    assert {one.state for one in found.values()} == {"confirmed"}


def said(own: Generation, tokens: list[int]) -> Generation:
    assert DECODE is not None
    return replace(own, token_ids=tuple(tokens), text=DECODE([tokens])[0])


def other_token(row: Answer) -> Answer:
    """The third-last token of every method's answer, with drafts that had it."""
    own = row.generation
    tokens = [*own.token_ids]
    was, tokens[-3] = tokens[-3], FOREIGN
    drafts = own.drafted_ids and tuple(FOREIGN if token == was else token for token in own.drafted_ids)
    return replace(row, generation=replace(said(own, tokens), drafted_ids=drafts))


def of_another_prompt(rows: list[Answer]) -> list[Answer]:
    """Each prompt has the answers of the next one."""
    num = len({row.method for row in rows})
    found = []
    for place in range(0, len(rows), num):
        for own in rows[place : place + num]:
            after = rows[(place + num) % len(rows) :][:num]
            (other,) = (row for row in after if row.method == own.method)
            generation = replace(other.generation, num_prompt_tokens=own.generation.num_prompt_tokens)
            found.append(replace(own, generation=generation, measured=other.measured, answer=other.answer))
    return found


def fewer_prompts(content: dict[str, Any]) -> None:
    content["plan"]["prompts"]["gsm8k"] = content["plan"]["prompts"]["gsm8k"][1:]


def without_the_first(rows: list[Answer]) -> list[Answer]:
    first = rows[0].prompt_id
    return [row for row in rows if row.prompt_id != first]


def faster(factor: float) -> Callable[[dict[str, Any]], None]:
    """Scale everything in `run.json` that tells of time."""

    def change(content: dict[str, Any]) -> None:
        forwards = content["forwards"]
        for name in ("seconds", "wide_s"):
            forwards[name] = {width: factor * seconds for width, seconds in forwards[name].items()}
        forwards["least_s"] *= factor
        content["pass_at_end_s"] *= factor

    return change


def renamed(content: dict[str, Any]) -> None:
    content["environment"]["cpu"] = "AMD EPYC 9965 192-Core Processor"


def in_another_suite(rows: list[Answer]) -> list[Answer]:
    return [replace(row, suite="math500") for row in rows]


def called_math(content: dict[str, Any]) -> None:
    for part in (content["identity"]["suites"], content["plan"]["prompts"]):
        part["math500"] = part.pop("gsm8k")


def identity(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["identity"].update(changes)


def with_other_weights(content: dict[str, Any]) -> None:
    content["identity"]["revisions"]["target"] = "f" * 64


@cases(
    "rows, info, check, state",
    [
        (each(other_token), None, "tokens", "refuted"),
        (one_after_another(of_another_prompt), None, "tokens", "refuted"),
        (of_generation(perfect, "dflash"), None, "counts", "refuted"),
        (each(lambda row: replace(row, passed=True)), None, "scores", "refuted"),
        (of_generation(lambda own: replace(own, text=own.text + "!")), None, "texts", "refuted"),
        (None, lambda content: content["times"]["dflash"].update(decode_s=0.1), "arithmetic", "refuted"),
        (each(lambda row: scaled(row, 0.02), "dflash"), None, "arithmetic", "refuted"),
        (each(lambda row: scaled(row, 0.2)), faster(0.2), "times", "doubtful"),
        (one_after_another(each(lambda row: scaled(row, 8.0), "ar")), None, "times", "doubtful"),
        (None, renamed, "times", "unchecked"),
        (without_the_first, None, "arithmetic", "refuted"),
        (without_the_first, fewer_prompts, "plan", "refuted"),
        (in_another_suite, called_math, "plan", "refuted"),
        (None, identity(max_new_tokens=64), "arithmetic", "refuted"),
        (None, identity(seed=7), "plan", "refuted"),
        (None, with_other_weights, "models", "refuted"),
        (None, identity(dtype="bfloat16"), "models", "refuted"),
    ],
)
def test_a_forged_run_is_refused_or_its_doubt_named(
    honest: Path, rechecked: Rechecked, tmp_path: Path, rows: Rows | None, info: Info | None, check: str, state: str
) -> None:
    found = rechecked(forge(honest, tmp_path / "run", rows or list, info or (lambda _: None)))
    assert found[check].state == state, found


@cases("changes", [{"temperature": 1.0}, {"dtype": "bfloat16"}, {"max_new_tokens": 24}])
def test_a_run_measured_otherwise_than_it_says_is_refused(
    honest: Path, rechecked: Rechecked, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Identity and options are those of the honest run; the rows are of sampling, of rounding or of other limits."""
    db.run(**{**USUAL, **changes}, out=tmp_path / "other")
    like = store.read_info(honest).to_json()
    greedy = store.load(honest)[1][0].settings

    def claim(content: dict[str, Any]) -> None:
        content |= {name: like[name] for name in ("identity", "options", "plan")}

    found = rechecked(
        forge(tmp_path / "other", tmp_path / "run", each(lambda row: replace(row, settings=greedy)), claim)
    )
    assert "refuted" in {one.state for one in found.values()}, found


def test_a_pack_that_was_changed_is_no_pack(honest: Path, tmp_path: Path) -> None:
    pack.write(honest, tmp_path / "pack.zip")
    with zipfile.ZipFile(tmp_path / "pack.zip") as sound, zipfile.ZipFile(tmp_path / "other.zip", "w") as changed:
        for name in sound.namelist():
            changed.writestr(name, sound.read(name).replace(b'"gsm8k"', b'"gsm9k"'))
    with pytest.raises(UserError, match="not the file that was packed"):
        pack.unpack(tmp_path / "other.zip", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@cases("name", ["../run.json", "/tmp/run.json", "part-000000.parquet/../x", "notes.txt"])
def test_a_member_that_no_pack_has_is_refused(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "pack.zip", "w") as archive:
        archive.writestr(pack.LIST, '{"schema": 1, "files": {}}')
        archive.writestr(name, "x")
    with pytest.raises(UserError):
        pack.unpack(tmp_path / "pack.zip", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"pack.zip"}


def test_what_is_no_pack_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "pack.zip").write_bytes(b"PK\3\4 no more")
    for path in (tmp_path / "pack.zip", tmp_path, tmp_path / "none.zip"):
        with pytest.raises(UserError):
            pack.unpack(path, tmp_path / "out")
