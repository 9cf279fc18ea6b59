"""A run: every prompt under all settings through every method, judged, scored and saved.

Methods take turns prompt by prompt in alternating order, so that a machine that slows down slows all of them. Where
several answers are decoded at a time, methods take turns with all prompts of a suite. A resumed run makes only what is
not saved.
"""

from __future__ import annotations

from collections.abc import Iterable

from dflash_bench.records import NOBODY, Message, Settings
from dflash_bench.results.identity import short_names
from dflash_bench.run.canaries import Canaries
from dflash_bench.run.conversation import Conversation, WarmUp, answer_together
from dflash_bench.run.items import Backend, Item, Ledger, Plan, Watcher


def execute(
    plan: Plan,
    backend: Backend,
    run: Ledger,
    watcher: Watcher,
    items: Iterable[Item] | None = None,
    warm: dict[str, WarmUp] | None = None,
    canaries: Canaries | None = None,
) -> None:
    """Run what of `items`, of all of the plan's if absent, is not stored yet.

    `warm` has the suites that this backend has been warmed up with, and gets the others. `canaries` are offered the
    answers. Killed at any time, it loses
    what `Conversation.answer` or `answer_together` holds back, no more.
    """
    warm = {} if warm is None else warm
    canaries = Canaries() if canaries is None else canaries
    named = short_names(plan.settings)
    waves: dict[tuple[str, int, Settings], list[Conversation]] = {}
    for item in plan.items() if items is None else items:
        if item.is_stored(run):
            continue
        if item.suite not in warm:
            watcher.begins(item.suite, "warming up")
            warm[item.suite] = _warm_up(plan, backend, item)
        conversation = Conversation(item, plan, backend, run, watcher, warm[item.suite], canaries, named[item.settings])
        if item.settings.is_shared:
            waves.setdefault((item.suite, item.repeat, item.settings), []).append(conversation)
            continue
        for turn in range(len(item.prompt.turns)):
            conversation.answer(turn)
    for conversations in waves.values():
        for turn in range(max(conversation.num_turns for conversation in conversations)):
            answer_together([one for one in conversations if turn < one.num_turns], turn)


def _warm_up(plan: Plan, backend: Backend, item: Item) -> WarmUp:
    """The same loop on the same prompt, thrown away but for the plain answer."""
    messages = (*item.prompt.opening, Message("user", item.turns[0]))
    answers = [backend.generate(method, messages, item.settings, 0, NOBODY) for method in plan.methods]
    return WarmUp(item.suite, item.prompt.prompt_id, item.settings, answers[0])
