"""Replay: exact from drafts recorded at every position, an estimate from rounds alone; controllers that misbehave."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_bench as db
from dflash_bench.core.methods import METHODS, parse
from dflash_bench.core.types import GREEDY
from dflash_bench.measurements.record import calibration, require_recorded, sections
from dflash_bench.replay import controllers
from dflash_bench.replay.replay import (
    MEASURED,
    Alternative,
    RoundCosts,
    WidthSeconds,
    _bounds,
    changes_of,
    replay,
    walk,
)
from dflash_bench.replay.stored_answers import ReplayCell, StoredAnswer, _cell, cells_of
from dflash_bench.report import plots
from dflash_bench.results import parts, row_checks
from dflash_bench.results.row_arrays import RunFacts
from helpers import tiny
from helpers.each import each
from helpers.rows import drafted, plain, record
from helpers.runs import about

TEXTS = (
    "What is 2+2?",
    "Name a colour.",
    "Count to five.",
    "Say it again.",
    "Why is that so?",
    "And then?",
    "Who?",
    "When?",
)
OURS = ("eagle3:6", "dflash", "mtp:4", "draft-model:5")


def measured(folder: Path, out: str, *methods: str, model: str | None = None, **options: object) -> db.Run:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    given = {"audit": "none", "max_new_tokens": 16, **options}
    return db.run(model=model or folder / "model", prompts=prompts, methods=methods, out=folder / out, **given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    tiny.build(folder / "model")
    return folder


@pytest.fixture(scope="module")
def recorded(folder: Path) -> db.Run:
    """Nano's, whose drafts are often right."""
    return measured(folder, "recorded", *OURS, model="nano", record="every-position")


@pytest.fixture(scope="module")
def shorter(folder: Path) -> db.Run:
    """The same drafts, cut to fewer tokens by methods that were measured."""
    return measured(folder, "shorter", "eagle3:2", "ddtree:nodes=5,top_k=1", "mtp:2", "draft-model:3", model="nano")


class Noting(controllers.Fixed):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.kept: list[int] = []

    def learn(self, verified: int, accepted: int) -> None:
        self.kept.append(accepted)


@pytest.mark.parametrize(
    ("method", "n", "other"),
    [
        ("eagle3:6", 2, "eagle3:2"),
        ("dflash", 5, "ddtree:nodes=5,top_k=1"),
        ("mtp:4", 2, "mtp:2"),
        ("draft-model:5", 3, "draft-model:3"),
    ],
)
def test_another_length_accepts_round_by_round_what_a_measured_run_does(
    recorded: db.Run, shorter: db.Run, method: str, n: int, other: str
) -> None:
    cells = {cell.method: cell for run in (recorded, shorter) for cell in cells_of(run.document.results)}
    assert not cells[method].num_off and cells[method].is_recorded
    for own, due in zip(cells[method].answers, cells[other].answers, strict=True):
        controller = Noting(n)
        walk(own, controller)
        assert own.prompt_id == due.prompt_id and controller.kept == due.accepted.tolist()


def test_all_that_a_round_drafted_and_kept_was_recorded_at_its_position(recorded: db.Run) -> None:
    """Whatever the rounds before it were: the methods that may be recorded depend on the text alone."""
    assert {cell.method: cell.num_off for cell in cells_of(recorded.document.results)} == dict.fromkeys(OURS, 0)
    results = recorded.replay("eagle3:6", n=(2, 6))
    assert [one.is_exact for one in results] == [True] * 3
    assert results[0].length == pytest.approx(results[2].length) and results[1].verified == 2


def test_a_recording_says_what_fewer_tokens_cost_there(recorded: db.Run) -> None:
    """How long is the machine's affair: there is a time for each length, and a draft grows token by token."""
    for cell in cells_of(recorded.document.results):
        by_token = cell.method != "dflash"
        costs = RoundCosts(cell, WidthSeconds(recorded.document.results.info))
        assert (costs.drafts is not None) == by_token
        assert costs.passes is not None
        for one in cell.answers:
            drafts, passes = one.recorded_draft_s, one.recorded_verify_s
            assert (drafts is not None) == by_token
            assert drafts is None or (len(drafts) == cell.most and (np.diff([0.0, *drafts]) > 0).all())
            assert len(passes) == cell.most + 1 and passes.min() > 0
    for one in recorded.replay("eagle3:6", n=(2,))[1:]:
        assert one.speedup is not None and one.speedup.low is None, "nothing says how far its times are off"


def test_a_round_changes_by_what_was_recorded_and_by_the_curve_without() -> None:
    three = np.array([3, 3])
    stored = StoredAnswer("p", 10, 1.0, three, three, three, 0.0, 0.0, 0.0, usual_draft_s=0.9, usual_verify_s=2.5)
    known = replace(
        stored, recorded_draft_s=np.array([0.1, 0.3, 0.5]), recorded_verify_s=np.array([1.0, 1.2, 1.1, 2.0])
    )
    curve: Any = lambda width: 1 + (width - 1) / 3  # noqa: E731
    costs, fast, bare = (
        RoundCosts(ReplayCell("s", "eagle3:3", GREEDY, (one,), {}), curve)
        for one in (known, replace(known, usual_verify_s=1.0), stored)
    )
    # A usual round spends 0.4 s around its draft and 0.5 s around its pass, and a disturbed one twice as much on all.
    assert costs.drafting(0.9, 3, 1) == pytest.approx(0.5)
    # The latter shrinks with the round.
    assert costs.reading(2.5, 4, 1) == pytest.approx(1.125) and costs.reading(5.0, 4, 1) == pytest.approx(2.25)
    # Wider passes take no less than narrower ones.
    assert [costs.reading(2.5, 4, width) for width in (2, 3)] == pytest.approx([1.15 + 0.25, 1.15 + 0.375])
    # Rounds that were faster than the recording.
    assert fast.reading(1.0, 4, 1) == pytest.approx(0.5)
    # Without a recording: five steps, of which two read what was kept; and a token of the curve's takes 1 s, four 2 s.
    assert bare.drafting(0.5, 3, 1) == pytest.approx(0.3)
    assert bare.reading(2.5, 4, 1) == pytest.approx(1.125)


def test_a_run_without_recordings_gives_estimates_and_says_so(shorter: db.Run) -> None:
    same, one, longer = shorter.replay("eagle3:2", n=(1, 4))
    rounds = shorter.rounds[shorter.rounds["method"] == "eagle3:2"]
    assert same.length is not None and same.length.value == pytest.approx((rounds["accepted"] + 1).mean())
    assert (same.is_exact, one.is_exact, longer.is_exact) == (True, False, False)
    assert one.length is not None and longer.length is not None
    assert one.length.value < same.length.value < longer.length.value
    with pytest.raises(db.UserError, match="no probabilities of eagle3:2"):
        shorter.replay("eagle3:2", cut=(0.5,))


def test_a_longer_draft_of_the_same_rounds_is_never_predicted_to_accept_less() -> None:
    """Answers that end within a round: their last tokens are accepted, although they are not in the answer."""
    rng = np.random.default_rng(0)
    answers = []
    for number in range(12):
        accepted = rng.integers(0, 8, size=3 + number)
        drafted = np.full(len(accepted), 7)
        decoded = int((accepted + 1).sum()) - int(accepted[-1])
        answers.append(StoredAnswer(str(number), decoded, 1.0, drafted, accepted, drafted, 0.0, 0.0, 0.0))
    cell = ReplayCell("s", "eagle3:7", GREEDY, tuple(answers), {})
    changes = [Alternative(MEASURED), *changes_of(n=[*range(1, 8), 9, 12, 25])]
    measured_length, *lengths = [one.length.value for one in (replay(cell, c, about()) for c in changes) if one.length]
    assert lengths == sorted(lengths) and lengths[6] == pytest.approx(measured_length, rel=1e-12)
    total = sum(int((one.accepted + 1).sum()) for one in answers) / sum(len(one.accepted) for one in answers)
    assert measured_length == pytest.approx(total)


def test_rounds_that_drafted_less_than_the_longest_have_no_more_to_draft() -> None:
    """ngram: no match in the first round, and a short one in the last."""
    drafted, accepted = np.array([0, 4, 4, 2]), np.array([0, 4, 2, 2])
    stored = StoredAnswer("p", 12, 1.0, drafted, accepted, drafted, 0.0, 0.0, 0.0)
    cell = ReplayCell("s", "ngram:4", GREEDY, (stored,), {})
    found = [replay(cell, change, about()) for change in (Alternative(MEASURED), *changes_of(n=[2, 4, 6]))]
    # 12 tokens in 4 rounds; 2 at a time 10 in 4, of 0, 2, 2 and 2 drafted; 2 more of the one draft that was all right.
    assert [one.length and one.length.value for one in found] == [3, 2.5, 3, 3.5]
    assert [one.verified for one in found] == [2.5, 1.5, 2.5, 3.5]


def test_as_measured_is_the_runs_own_figure_and_interval(recorded: db.Run, shorter: db.Run) -> None:
    for run in (recorded, shorter):
        cells = {cell.method: cell for cell in run.document.cells}
        for one in run.replay(n=(1,)):
            if one.change == MEASURED:
                for own, shown in (("al.pooled", one.length), ("speedup.decode", one.speedup)):
                    figure = cells[one.method].figures[own]
                    assert shown is not None and shown.low is not None, own
                    bounds = [(found.value, found.low, found.high) for found in (shown, figure)]
                    assert bounds[0] == pytest.approx(bounds[1]), (one.method, own)


def test_a_failed_answer_has_no_part_in_the_other_sides_seconds() -> None:
    """0.4 s of plain decoding for 10 tokens against 0.1 s; the second turn's plain answer failed."""
    two = np.array([4, 4])
    answer_of = StoredAnswer("p", 10, 0.1, two, two, two, 0.0, 0.05, 0.1)
    first, second = ("p", 0, 0), ("p", 1, 0)
    own = {first: answer_of, second: replace(answer_of, decode_s=9.0, round_s=9.0)}
    cell = _cell("s", "eagle3:4", GREEDY, own, {first: (0.4, 10.0), ("p", 2, 0): (7.0, 1.0)})
    assert cell.plain == {"p": (0.4, 10.0)} and [one.is_paired for one in cell.answers] == [True, False]
    turns = _cell("s", "eagle3:4", GREEDY, own, {first: (0.5, 10.0), second: (0.25, 5.0)})
    assert turns.plain == {"p": (0.75, 15.0)}
    size = {"weight_bytes": 1_000_000, "matrix_elements": 250_000, "attention": []}
    seconds = {"1": 0.01, "16": 0.01}
    forwards = {"rows": 1, "context": 5, "seconds": seconds, "bandwidth": 1e9, "products": 1e15, "size": size}
    info = about(forwards=forwards)
    found = replay(cell, Alternative(MEASURED), info)
    assert found.speedup is not None and found.speedup.value == pytest.approx(4.0)
    assert found.length is not None and found.length.value == 5


def cost(width: float) -> float:
    """The seconds of a pass in the next test: 10 ms for one token, and 1 ms for each more."""
    return 0.009 + 0.001 * width


@each(
    "method, change, load, rounds, draft_s, read, length",
    [
        ("eagle3:4", Alternative(MEASURED), 1, 2, 0.02, 4.5, 4),
        # A round drafts 5 wide and reads 4.5; plain decoding reads 4 in place of 1.
        ("eagle3:4", Alternative(MEASURED), 4, 2, 0.02 * cost(20) / cost(5), 4.5, 4),
        # 6 tokens in two rounds, in place of 8; four steps of the draft in place of six.
        ("eagle3:4", *changes_of(n=[2]), 1, 8 / 3, 0.02 * 4 / 6, 3, 3),
        # The round that was right to the end has two more.
        ("eagle3:4", *changes_of(n=[6]), 1, 8 / 5, 0.02 * 8 / 6, 7, 5),
        ("dflash", *changes_of(block=[8]), 1, 8 / 5.5, 0.02 * cost(8) / cost(5), 8, 5.5),
    ],
)
def test_seconds_follow_the_rounds_and_the_width_curve(
    method: str, change: Alternative, load: int, rounds: float, draft_s: float, read: float, length: float
) -> None:
    """Two rounds of 20 ms in the draft, 40 in the target and 40 beside, and 50 ms beside them, for 8 tokens."""
    four, kept, cut = np.array([4, 4]), np.array([4, 2]), np.array([4, 3])
    stored = StoredAnswer("p", 8, 0.25, four, kept, cut, 0.04, 0.08, 0.2)
    size = {"weight_bytes": 1_000_000, "matrix_elements": 250_000, "attention": []}
    seconds = {str(width): cost(width) for width in (1, 33)}
    forwards = {"rows": 1, "context": 5, "seconds": seconds, "bandwidth": 1e9, "products": 1e15, "size": size}
    cell = ReplayCell("s", method, GREEDY, (stored,), {"p": (0.4, 8.0)})
    found = replay(cell, change, about(forwards=forwards), load)
    taken = rounds * (draft_s + 0.04 * cost(load * read) / cost(4.5) + 0.04) + 0.05
    assert found.length and found.speedup and found.tokens_per_s
    assert (found.length.value, found.verified) == pytest.approx((length, read - 1))
    assert found.tokens_per_s == pytest.approx(load * 8 / taken)
    assert found.speedup.value == pytest.approx(0.4 * cost(load) / cost(1) / taken)
    curve = WidthSeconds(about(forwards=forwards))
    assert curve.line and curve(40) == pytest.approx(cost(33) + 7 * curve.line.c1)


@each("name", ["suffix", "ngram", "lookahead", "ddtree", "eagle3-tree", "random", "dflash:block=auto"])
def test_a_method_whose_draft_depends_on_more_than_the_text_is_not_recorded(name: str) -> None:
    with pytest.raises(db.UserError, match=f"--record: {name}"):
        require_recorded(parse(name))
    assert [kind.name for kind in METHODS.values() if kind.is_recorded] == ["dflash", "eagle3", "mtp", "draft-model"]


def answer(positions: list[int], scores: list[list[float]] | None = None) -> StoredAnswer:
    none = np.array([3])
    return StoredAnswer(
        "p",
        len(positions),
        1.0,
        none,
        none,
        none,
        0.0,
        0.0,
        0.0,
        np.array(positions),
        None if scores is None else np.array(scores),
    )


def test_an_estimate_reaches_from_the_least_to_the_most_that_its_rounds_allow() -> None:
    """Rounds of 8 and 2 tokens, of 7 drafted: two at a time they begin anew after 3 and 6, where nothing is stored."""
    stored = StoredAnswer("p", 10, 1.0, np.array([7, 7]), np.array([7, 1]), np.array([7, 7]), 0.0, 0.0, 0.0)
    least, most = (tokens / rounds for tokens, rounds in ((10, 4), (11, 4)))
    assert [1 + kept / rounds for rounds, kept, _ in _bounds(stored, 2, 7)] == [least, most]
    assert [1 + kept / rounds for rounds, kept, _ in _bounds(stored, 7, 7)] == [5, 5], "the stored rounds themselves"
    assert [1 + kept / rounds for rounds, kept, _ in _bounds(stored, 9, 7)] == [5, 6], "two more, after the round of 8"
    (kept, rounds) = (_bounds(replace(stored, accepted=np.array([6, 1])), 2, 7)[0][at] for at in (1, 0))
    assert 1 + kept / rounds == 9 / 4, "a round of 7 tokens is three"
    # The prompts are all alike, so nothing else makes the interval wide.
    alike = tuple(replace(stored, prompt_id=str(number)) for number in range(8))
    length = replay(ReplayCell("s", "eagle3:7", GREEDY, alike, {}), *changes_of(n=[2]), about()).length
    assert length is not None and (length.value, length.low, length.high) == pytest.approx((2.5, 2.5, 2.75))


def test_estimates_cover_what_a_recorded_run_says_exactly(recorded: db.Run) -> None:
    for cell in cells_of(recorded.document.results):
        bare = replace(cell, answers=tuple(replace(one, positions=None, scores=None) for one in cell.answers))
        for change in changes_of(n=range(1, cell.most)):
            true, estimate = (replay(one, change, recorded.document.results.info) for one in (cell, bare))
            assert true.is_exact and not estimate.is_exact
            assert true.length and estimate.length and estimate.length.contains(true.length.value), change.name
        (block,) = changes_of(block=[4]) if cell.method == "dflash" else [None]
        if block is not None:
            unknown = replay(bare, block, recorded.document.results.info).length
            assert unknown is not None and unknown.low is None, "another block drafts other tokens"


def test_a_walk_begins_each_round_where_the_one_before_ended() -> None:
    assert walk(answer([3, 0, 1, 0, 2, 1]), controllers.Fixed(3)) == (2, 5, 6)
    assert walk(answer([3, 0, 1, 0, 2, 1]), controllers.Fixed(1)) == (3, 3, 3)
    cut = walk(answer([3, 0, 1, 0], [[0.9, 0.4, 0.9]] * 4), controllers.Cut(0.5))
    assert cut == (2, 2, 2)


def test_confidence_is_counted_where_all_before_was_right(recorded: db.Run) -> None:
    cell = cells_of(recorded.document.results)[0]
    small = replace(cell, answers=(answer([1, 0], [[0.95, 0.25], [0.25, 0.85]]),))
    found = calibration(small)
    assert found is not None and found.brier == pytest.approx((0.05**2 + 0.25**2 + 0.25**2) / 3)
    assert [(one.low, one.num_tokens, one.accepted) for one in found.bins] == [(0.2, 2, 0.0), (0.9, 1, 1.0)]
    assert "Brier score" in str(recorded)
    # A cut at 0.5 verifies the first token of the first round, and nothing after the anchor of a second.
    cuts = {one.threshold: one for one in found.cuts}
    assert (cuts[0.0].length, cuts[0.0].verified, cuts[0.0].saved, cuts[0.0].more_rounds) == (2, 2, 0, 0)
    assert (cuts[0.5].length, cuts[0.5].verified, cuts[0.5].saved, cuts[0.5].more_rounds) == (2, 1, 0.5, 0)
    assert (cuts[0.95].verified, cuts[0.95].more_rounds) == (1, 0)


def test_a_report_draws_how_far_confidence_can_be_trusted_and_says_what_cuts_save(recorded: db.Run) -> None:
    svg = plots.svg(plots.Material(recorded.document), "reliability")
    assert "% said" in svg and all(f'data-method="{method}"' in svg for method in OURS)
    shown = {one.id: one for one in sections(recorded.document)}
    rows = shown["cuts"].table.rows if shown["cuts"].table else []
    assert [row.values[0] for row in rows[:3]] == ["none", "0.1", "0.3"]


def test_a_run_of_batches_alone_has_nothing_to_calibrate(folder: Path) -> None:
    together = measured(folder, "together", "dflash", concurrency=2, record="every-position", max_new_tokens=8)
    assert not sections(together.document) and "Brier" not in str(together)


WRITES = (
    "import contextlib, os, time\n        for fd in range(3, 20):\n"
    "            with contextlib.suppress(OSError): os.write(fd, {!r})\n        "
)
"""The beginning of a body that writes into every pipe it finds."""


@each(
    "body, why",
    [
        ("return 1 / 0", "it raised ZeroDivisionError"),
        ("while True: pass", "did not return within"),
        ("return most_of_all", "it raised NameError"),
        ("return sum(iter(int, 1))", "did not return within"),
        ("return 99", "returned 99.* 0 to 2"),
        ("return True", "returned True"),
        ("return -1", "returned -1"),
        ("return 1.0", "returned 1.0"),
        ("raise SystemExit", "it raised SystemExit"),
        ("raise BaseException", "it raised BaseException"),
        ("import os; os._exit(0)", "it ended its process"),
        *[
            (WRITES.format(line) + "return 1", "wrote into the pipe")
            for line in (b"5\n", b"[null, 1]\n", b"[" * 1000 + b"\n", b"x" * 9000, b"[null,")
        ],
        (WRITES.format(b"[null,") + "time.sleep(1000)", "did not return within"),
    ],
)
def test_a_controller_that_misbehaves_is_named(
    shorter: db.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, why: str
) -> None:
    if "within" in why:
        monkeypatch.setattr(controllers, "TOO_LONG_S", 0.2)
    path = tmp_path / "mine.py"
    path.write_text(
        "class Controller:\n    def start(self, most): pass\n    def learn(self, verified, accepted): pass\n"
        f"    def choose(self, scores):\n        {body}\n"
    )
    with pytest.raises(db.UserError, match=why):
        shorter.replay("eagle3:2", controller=(str(path),))


def test_controllers_of_ones_own_and_ours(recorded: db.Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "class Controller:\n    def start(self, most): self.most = most\n    def choose(self, scores): return 2\n"
        "    def learn(self, verified, accepted): assert accepted <= verified == 2\n"
    )
    results = recorded.replay("eagle3:6", controller=(str(path), "fixed:2", "average", "ours"))
    assert results[1].length == results[2].length and all(one.is_exact for one in results)
    with pytest.raises(db.UserError, match=r"FILE.py, average, fixed:N, ours"):
        recorded.replay(controller=("best",))


def test_a_recording_of_other_tokens_is_no_measurement() -> None:
    row = drafted("p", [1, 0], 2).generation
    tokens, facts = row.token_ids, RunFacts(blocks={}, ceiling=1e-3)
    ids = (tokens[1], 99, 99, 99, tokens[3], 99)
    good = {"recorded_ids": ids, "recorded_accepted": (1, 0, 1)}
    cases: list[tuple[dict[str, Any], bool]] = [
        *(({"recorded_accepted": kept}, kept != (1, 0, 1)) for kept in ((1, 0, 1), (2, 0, 1), (0, 0, 1), (1, 0))),
        *(({"recorded_draft_s": times}, times != (0.1, 0.2)) for times in ((0.1, 0.2), (0.1,), (0.1, float("nan")))),
        *(({"recorded_verify_s": times}, times != (0.1,) * 3) for times in ((0.1,) * 3, (0.1,) * 2, (0.1, -1.0, 0.1))),
    ]
    for changed, broken in cases:
        one = record("dflash", "p", row, **(good | changed))
        batch = parts.to_table([one, plain("p", 3)], {}).combine_chunks().to_batches()[0]
        assert bool(row_checks.faults(batch, facts)) == broken, changed
