"""The runner's own clock and counter: faults in what a backend says of times and counts, through real runs of nano."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

import dflash_bench as db
from dflash_bench.core.types import Answer, Generation, Listener, Message, Settings
from dflash_bench.engine.backend import LocalBackend, RequestTrace
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.drafters.ngram import NGramDrafter
from dflash_bench.engine.graphs import GraphCache
from dflash_bench.engine.rows import HostClock
from dflash_bench.engine.target import Target
from dflash_bench.results import store
from dflash_bench.runner import session, setup, stopwatch
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import methods_and_model
from dflash_bench.runner.stopwatch import Objection, Stopwatch
from helpers.each import each
from helpers.faults.in_clocks import (
    HIDDEN_S,
    after_work,
    another_token,
    begun_late,
    halved,
    merged,
    quick_drafts,
    without_end,
)
from helpers.rows import generation
from helpers.runs import listed

Main = Callable[..., tuple[int, str, str]]
Change = Callable[[Generation], Generation]
ASKED = RunRequest(suites=("gsm8k",), methods=("dflash",), max_new_tokens=16, limit=1, audit="none")
WORDS = "--suite gsm8k --max-new-tokens 16 --method dflash".split()


@pytest.fixture(scope="module")
def engine() -> LocalBackend:
    """Opened once for all runs that ask for no other."""
    request, methods, model = methods_and_model(ASKED)
    return setup.open_engine(model, methods, request, request.max_new_tokens or 0)


@pytest.fixture(autouse=True)
def set_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a curve of passes: it and opening the engine take most of the time of such a run."""
    monkeypatch.setattr(session, "forwards_of", lambda _: None)


def slow_prefill(said: Generation) -> Generation:
    return replace(said, prefill_s=said.prefill_s + 0.01, decode_s=said.decode_s - 0.01)


@each(
    "change, methods, why",
    [
        (halved, {"ar", "dflash"}, "clock: the reported decoding time"),
        (quick_drafts, {"dflash"}, "clock: the reported decoding time"),
        (merged, {"ar", "dflash"}, "counter: the runner received"),
        (slow_prefill, {"ar", "dflash"}, "clock: the reported decoding time"),
        (another_token, {"ar", "dflash"}, "counter: the runner received other tokens"),
        (without_end, {"ar", "dflash"}, "counter: the runner received other tokens"),
    ],
)
def test_what_a_backend_says_otherwise_than_the_runner_heard_it_is_a_failed_row(
    engine: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, methods: set[str], why: str
) -> None:
    sound = RequestTrace.generation
    monkeypatch.setattr(RequestTrace, "generation", lambda *args: change(sound(*args)))
    assert_denied(engine, tmp_path, methods, why)


def assert_denied(engine: LocalBackend, folder: Path, methods: set[str], why: str, **options: Any) -> None:
    """An answer alone by default; of several at a time, two."""
    request = replace(ASKED, **({"limit": 2} | options if options else {}))
    caller = session.Caller(print, opens=lambda *_: engine)
    session.perform(request, folder / "run", resume=False, caller=caller)
    rows = store.load(folder / "run")[1]
    assert {row.method for row in rows if row.generation.error} == methods, [row.generation.error for row in rows]
    for row in rows:
        if row.method in methods:
            assert (row.generation.error or "").startswith(why)
            assert (row.generation.prefill_s, row.generation.decode_s, row.generation.accepted) == (0, 0, None)


def test_a_clock_that_runs_slow_is_found_and_the_command_fails(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = HostClock.seconds
    monkeypatch.setattr(HostClock, "seconds", lambda *args: sound(*args) / 2)
    status, _, err = main("run", *WORDS, "--limit", 2, "--out", "run")
    assert status == 1 and "answers failed" in err
    assert {str(row.generation.error).partition(" time ")[0] for row in store.load(Path("run"))[1]} == {
        "clock: the reported decoding"
    }
    assert main("check", "run")[0] != 0


LATE_S = 0.02
"""Ten processes taking turns on a GPU delayed it by 7 ms."""


class SharedDeviceClock(HostClock):
    """The clock of a shared device: after idling, it starts queued work up to LATE_S late."""

    runs_ahead = True

    def __init__(self) -> None:
        self.is_idle, self.free_s, self.numbers = True, 0.0, random.Random(0)

    def mark(self) -> float:
        late_s = LATE_S * self.numbers.random() if self.is_idle else 0.0
        self.free_s = max(self.free_s, time.perf_counter() + late_s)
        self.is_idle = False
        return self.free_s

    def settle(self) -> None:
        while time.perf_counter() < self.free_s:
            pass
        self.is_idle = True


@each("concurrency", [1, 2])
def test_answers_of_a_device_that_others_use_are_sound(
    engine: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> None:
    clock = SharedDeviceClock()
    for name in ("prefill", "forward"):
        computed = getattr(Target, name)

        def queued(*args: Any, computed: Any = computed, **options: Any) -> Any:
            while time.perf_counter() < clock.free_s:
                pass
            return computed(*args, **options)

        monkeypatch.setattr(Target, name, queued)
    monkeypatch.setattr(engine, "clock", clock)
    assert_denied(engine, tmp_path, set(), "", limit=4, concurrency=(concurrency,))


@each("captures", [True, False])
def test_a_batch_is_warmed_up_where_passes_are_captured(
    engine: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captures: bool
) -> None:
    """With the longest prompts, as many as are decoded together: nothing is new to the measured batch."""
    sizes: list[tuple[str, int, int]] = []
    serve = LocalBackend.serve

    def noted(self: LocalBackend, method: str, requests: Any, *more: Any, **named: Any) -> list[Generation]:
        if len(requests) > 1:
            sizes.append((method, len(requests), max(len(chat[0].content) for chat, _ in requests)))
        return serve(self, method, requests, *more, **named)

    monkeypatch.setattr(LocalBackend, "serve", noted)
    monkeypatch.setattr(LocalBackend, "captures", captures)
    assert_denied(engine, tmp_path, set(), "", limit=3, concurrency=(2,))
    (longest,) = {length for _, num, length in sizes if num == 3}
    warm_ups = [(method, 2, longest) for method in ("ar", "dflash")] if captures else []
    assert sizes == [*warm_ups, *((method, 3, longest) for method in ("ar", "dflash"))]


class Order(Listener):
    """Notes in which order prompts begin, the host waits for the device, and the clock has been read."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def began(self, request: int) -> None:
        self.events.append("began")

    def marked(self) -> None:
        self.events.append("marked")

    def received(self, request: int, tokens: Sequence[int]) -> None:
        self.events.append("received")


@each("runs_ahead", [True, False])
def test_a_prompt_that_begins_beside_others_makes_nobody_wait(
    engine: LocalBackend, monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    """Its moment stays open until the next read where the clock's mark is an event of a device."""
    clock, order = HostClock(), Order()
    clock.runs_ahead = runs_ahead
    clock.settle = lambda: order.events.append("waits")  # type: ignore[method-assign]
    monkeypatch.setattr(engine, "clock", clock)
    chats = [((Message("user", f"What is {number} and 1?"),), 0) for number in range(4)]
    engine.serve("ar", chats, Settings(concurrency=2), listener=order)
    events = order.events
    assert events[:5] == ["waits", "began", "began", "waits", "marked"]
    later = [events[at + 1] for at in range(3, len(events)) if events[at] == "began"]
    assert len(later) == 2 and {*later} <= ({"began", "received"} if runs_ahead else {"marked"})


@each("change", [None, merged, another_token])
def test_times_on_a_gpu_that_the_clock_contradicts_are_a_finding_and_wrong_counts_a_failure(
    engine: LocalBackend, main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change | None
) -> None:
    """The engine's clock is slow in all cases, and its rounds add up to its times."""
    seconds, sound = HostClock.seconds, RequestTrace.generation
    monkeypatch.setattr(HostClock, "seconds", lambda *args: seconds(*args) / 2)
    if change is not None:
        monkeypatch.setattr(RequestTrace, "generation", lambda *args: change(sound(*args)))
    monkeypatch.setattr(engine, "about", {**engine.about, "device": "cuda:0"})
    assert_denied(engine, tmp_path, {"ar", "dflash"} if change else set(), "counter: the runner received")
    rows = store.load(tmp_path / "run")[1]
    assert all(bool(row.clock_doubt) == (change is None) for row in rows)
    if change is not None:
        return
    found = [one for one in db.load(tmp_path / "run").findings if one.kind == "clock_doubt"]
    assert {(place.method, one.values[0]["num_answers"]) for one in found for place in one.places} == {
        ("ar", 1), ("dflash", 1)
    }  # fmt: skip
    assert "contradicts the times of 2 answers" in main("check", tmp_path / "run")[1]


def test_a_round_that_asks_the_target_twice_is_found(
    engine: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = Target.forward

    def twice(self: Target, tokens: Any, starts: Sequence[int], *args: Any, **options: Any) -> Any:
        if not options:
            sound(self, tokens, starts, *args)
        return sound(self, tokens, starts, *args, **options)

    monkeypatch.setattr(Target, "forward", twice)
    assert_denied(engine, tmp_path, {"ar", "dflash"}, "counter: the target was asked for")


@each(
    "where, name, methods, options",
    [
        (Target, "begin", {"ar", "dflash"}, {}),
        (Target, "begin", {"ar", "dflash"}, {"concurrency": (2,)}),
        (Target, "capture", {"ar", "dflash"}, {}),
        (DFlashDrafter, "begin", {"dflash"}, {"concurrency": (2,)}),
        (LocalBackend, "with_thinking", {"ar", "dflash"}, {}),
        (LocalBackend, "with_thinking", {"ar", "dflash"}, {"concurrency": (2,)}),
    ],
)
def test_work_outside_of_an_answers_times_is_found(
    engine: LocalBackend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    name: str,
    methods: set[str],
    options: dict[str, Any],
) -> None:
    # On a busy machine, what it waited in the whole call could excuse work after the last token.
    monkeypatch.setattr(stopwatch, "waited_s", lambda: 0.0)
    monkeypatch.setattr(where, name, after_work(getattr(where, name)))
    assert_denied(engine, tmp_path, methods, "clock: the call took", **options)


def test_a_little_work_each_time_is_found_from_the_second_on(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all methods alike: plain decoding is no excuse."""
    sound = Target.begin

    def begin(*args: Any) -> None:
        time.sleep(0.03)
        sound(*args)

    monkeypatch.setattr(Target, "begin", begin)
    status = main("run", *WORDS, "--audit", "none", "--limit", 3, "--out", "run")[0]
    errors = [row.generation.error for row in store.load(Path("run"))[1] if row.generation.error]
    assert all(error.startswith("clock: the call took") for error in errors)
    assert (status, len(errors)) == ((1, 4) if stopwatch.waited_s() is not None else (0, 0))


def test_capturing_passes_is_not_work_for_an_answer(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(self: Target, shortest: int, longest: int) -> None:
        self.graph_cache = self.graph_cache or GraphCache(lambda *_: lambda: (), is_whole=True)
        time.sleep(HIDDEN_S)
        self.graph_cache.spent_s += HIDDEN_S

    monkeypatch.setattr(Target, "capture", capture)
    assert main("run", *WORDS, "--limit", 1, "--kernels", "torch", "--out", "run")[0] == 0


def test_only_a_probe_foresees(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    # A class of its own: whether a class foresees is asked of it once, and remembered.
    sighted = type("Sighted", (NGramDrafter,), {"foresee": lambda *_: None})
    monkeypatch.setattr("dflash_bench.engine.drafters.ngram.NGramDrafter", sighted)
    status, _, err = main("run", *WORDS, "--limit", 1, "--method", "ngram", "--out", "run")
    assert status == 2 and "ngram" in err and "probes" in err
    assert main("run", *WORDS, "--limit", 1, "--method", "oracle", "--out", "run")[0] == 0


@pytest.mark.parametrize("options", [{}, {"concurrency": (2,), "limit": 3}])
def test_a_prompt_that_is_begun_late_is_found(
    engine: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    begun_late(monkeypatch)
    assert_denied(engine, tmp_path, {"ar", "dflash"}, "counter: its prompt was begun", **options)


def too_late(said: Generation) -> Generation:
    return replace(said, end_s=said.end_s + 60)


@each(
    "name, change, why",
    [
        ("generation", lambda said: replace(said, decode_s=said.decode_s / 4), "clock: the reported decoding time"),
        ("generation", lambda said: replace(said, prefill_s=said.prefill_s / 5), "clock: the reported prefill time"),
        ("generation", merged, "counter: the runner received"),
        ("timed", too_late, "clock: the reported end of the answer"),
        ("timed", lambda said: replace(said, end_s=said.start_s), "clock: the reported times of the answer"),
    ],
)
def test_the_interval_of_one_of_several_answers_lies_in_the_runners(
    engine: LocalBackend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: Callable[[Any], Any],
    why: str,
) -> None:
    sound = getattr(RequestTrace, name)
    monkeypatch.setattr(RequestTrace, name, lambda *args: change(sound(*args)))
    assert_denied(engine, tmp_path, {"ar", "dflash"}, why, concurrency=(2,))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run which no test changes."""
    folder = tmp_path_factory.mktemp("sound") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(session, "forwards_of", lambda _: None)
        return db.run(suite="gsm8k", methods=["dflash"], limit=2, max_new_tokens=16, out=folder).folder


@each("words", [(), ("--concurrency", "2"), ("--method", "eagle3-tree:nodes=7", "--temperature", "1")])
def test_of_a_sound_run_rows_hold_what_the_runner_saw(main: Main, sound: Path, words: tuple[str, ...]) -> None:
    if words:
        assert main("run", *WORDS, "--limit", 2, *words, "--out", "run")[0] == 0
    else:
        shutil.copytree(sound, "run")
    for row in store.load(Path("run"))[1]:
        if row.settings.is_shared:
            assert row.clock_s is None
            continue
        assert row.clock_s is not None and row.clock_s >= row.generation.prefill_s + row.generation.decode_s


@each(
    "change, why",
    [
        ({"decode_s": 0.3}, "its rounds took longer than decode_s"),
        ({"decode_s": 0.5, "prefill_s": 0.5}, "its rounds took longer than decode_s"),
        ({"decode_s": 30.0}, "its times are not those of the runner's own clock"),
    ],
)
def test_rows_that_were_edited_do_not_agree_with_the_runners_clock(
    main: Main, sound: Path, change: dict[str, float], why: str
) -> None:
    """Each of these columns times so much, in the rows of dflash."""
    shutil.copytree(sound, "run")
    for part in Path("run").glob("part-*.parquet"):
        table = parquet.read_table(part)
        for name, times in change.items():
            field = table.schema.field(name)
            values = [
                type(value)(value * times) if method == "dflash" else value
                for value, method in zip(
                    table.column(name).to_pylist(), table.column("method").to_pylist(), strict=True
                )
            ]
            table = table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))
        parquet.write_table(table, part)
    listed(Path("run"))
    status, shown, err = main("check", "run")
    assert status == 1 and why in shown, shown + err


# The stopwatch alone


def objection_alone(
    watch: Stopwatch, said: Generation, *, tells_rounds: bool, was_late: bool = False
) -> Objection | None:
    served = replace(said, start_s=0.0, end_s=watch.call_s)
    return stopwatch.objection(watch, served, tells_rounds=tells_rounds, was_late=was_late)


def heard(said: Generation, clock: list[float], passes: int = 1) -> Stopwatch:
    """The answer decoded by a clock that this list is."""
    with Stopwatch() as watch:
        listens(watch, said, clock, passes)
    return watch


def listens(watch: Stopwatch, said: Generation, clock: list[float], passes: int = 1) -> None:
    counts = [1, *(said.emitted or ())]
    seconds = [said.prefill_s, *(said.round_s or ())]
    tokens = list(said.token_ids)
    watch.began(0)
    watch.marked()
    for number, (count, took) in enumerate(zip(counts, seconds, strict=True)):
        clock[0] += took
        for _ in range(passes if number else 1):
            watch.passed()
        watch.received(0, tokens[:count])
        watch.marked()
        del tokens[:count]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    return now


SAID = generation([2, 0, 1], 4)
"""0.02 s to the first token, and three rounds of 0.02 s."""


@each(
    "change, agrees",
    [
        ({}, True),
        ({"decode_s": 0.06 * 0.98 - 0.00099}, True),
        ({"decode_s": 0.06 * 0.98 - 0.00101}, False),
        ({"decode_s": 0.06 * 1.02 - 0.0009, "prefill_s": 0.0197}, True),
        ({"prefill_s": 0.0185}, False),
        ({"prefill_s": 0.03, "decode_s": 0.05}, False),
        ({"decode_s": 0.07}, False),
        ({"emitted": (1, 3, 2)}, False),
        ({"token_ids": SAID.token_ids[:-1]}, False),
        ({"accepted": None, "emitted": None}, True),
    ],
)
def test_two_percent_and_a_millisecond_are_forgiven_and_no_count(
    clock: list[float], change: dict[str, Any], agrees: bool
) -> None:
    why = objection_alone(heard(SAID, clock), replace(SAID, **change), tells_rounds=True)
    assert (why is None) == agrees, why


@each(
    "hidden_s, waited, agrees",
    [
        (0.0199, 0.0, True),
        (0.0201, 0.0, False),
        (0.0499, 0.03, True),
        (0.0501, 0.03, False),
        (0.2499, None, True),
        (0.2501, None, False),
    ],
)
@each("is_after", [False, True])
def test_waiting_for_a_processor_is_no_work(
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    hidden_s: float,
    waited: float | None,
    agrees: bool,
    is_after: bool,
) -> None:
    held = [None if waited is None else 0.0]
    monkeypatch.setattr(stopwatch, "waited_s", lambda: held[0])
    with Stopwatch() as watch:
        for when in (False, True):
            if when == is_after:
                clock[0] += hidden_s + (SAID.num_tokens * 1e-4 if is_after else SAID.num_prompt_tokens * 2e-5)
                held[0] = waited
            if not when:
                listens(watch, SAID, clock)
    watch.served([SAID])
    is_small = hidden_s < stopwatch.ONCE_S
    for was_late in (False, True):
        why = objection_alone(watch, SAID, tells_rounds=True, was_late=was_late)
        assert (why is None) == (agrees or (is_small and not was_late)), why


@each("hidden_s, once, twice", [(0.39, True, True), (0.41, True, False), (0.79, True, False), (0.81, False, False)])
def test_a_long_call_may_spend_one_percent_outside_its_answers_and_once_two(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, hidden_s: float, once: bool, twice: bool
) -> None:
    monkeypatch.setattr(stopwatch, "waited_s", lambda: 0.0)
    decode_s = 40 - hidden_s - SAID.prefill_s
    said = replace(SAID, decode_s=decode_s, round_s=(decode_s / 3,) * 3)
    with Stopwatch() as watch:
        clock[0] += hidden_s + said.num_prompt_tokens * 2e-5
        listens(watch, said, clock)
    watch.served([said])
    whys = [objection_alone(watch, said, tells_rounds=True, was_late=was_late) for was_late in (False, True)]
    assert [why is None for why in whys] == [once, twice], whys


def test_a_process_that_is_held_up_between_two_readings_denies_nothing(clock: list[float]) -> None:
    """The backend reads its clock after it was held up, or before: both lie between the runner's two readings."""
    watch = heard(SAID, clock)
    answer = watch.answers[0]
    assert answer.last.after is not None
    answer.last.after += 0.5
    watch.call_s += 0.5
    for decode_s in (0.06, 0.3, 0.56):
        assert objection_alone(watch, replace(SAID, decode_s=decode_s), tells_rounds=True) is None
    assert objection_alone(watch, replace(SAID, decode_s=0.05), tells_rounds=True)


def test_passes_that_are_more_than_rounds_are_counted(clock: list[float]) -> None:
    objection = objection_alone(heard(SAID, clock, 2), SAID, tells_rounds=True)
    assert objection is not None and objection.by == "counter" and objection.why.startswith("the target")
    assert objection_alone(heard(SAID, clock, 0), SAID, tells_rounds=True)


def test_who_tells_nothing_is_held_against_the_call_alone(clock: list[float]) -> None:
    watch = Stopwatch()
    with watch:
        clock[0] += 0.08
    assert objection_alone(watch, SAID, tells_rounds=True) == Objection("counter", "the runner received no token")
    assert objection_alone(watch, SAID, tells_rounds=False) is None
    assert objection_alone(watch, replace(SAID, decode_s=0.07), tells_rounds=False)
    assert stopwatch.objection(watch, replace(SAID, start_s=0.0, end_s=0.081), request=0, tells_rounds=False) is None
    assert stopwatch.objection(watch, replace(SAID, start_s=-0.01, end_s=0.08), request=0, tells_rounds=False)
    assert stopwatch.objection(watch, replace(SAID, start_s=0.01, end_s=0.09), request=0, tells_rounds=False)
    assert stopwatch.objection(watch, replace(SAID, start_s=0.03, end_s=0.08), request=0, tells_rounds=False)
    assert watch.call_s == pytest.approx(0.08)


def test_a_failed_answer_stays_what_it_is(clock: list[float]) -> None:
    failed = replace(SAID, error="NaN", finish_reason="error")
    assert objection_alone(Stopwatch(), failed, tells_rounds=True) is None
    record = Answer("s", 1, "p", "h", None, 0, "ar", 0, 0, failed)
    assert record.clock_s is None
