"""The command demo: one prompt answered by plain decoding and with a draft, side by side."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from dflash_bench.cli.command import Command
from dflash_bench.core.errors import UserError
from dflash_bench.core.labels import visible, wrapped
from dflash_bench.core.methods import BASELINE, shown
from dflash_bench.core.option import MOST_TOKENS
from dflash_bench.core.terminal import Stages, say, terminal_width, wide

if TYPE_CHECKING:
    from rich.text import Text

    from dflash_bench.api.engine import Engine

app = typer.Typer()

LENGTH_S = 5.0
"""Seconds that the slower answer takes on the screen."""
FRAME_S = 0.05
NARROW = 50
"""Terminal width below which the answers are stacked."""


@dataclass(frozen=True, slots=True)
class Typed:
    """Text that appeared at once: accepted draft tokens, or one of the target's own tokens."""

    at_s: float
    """Seconds since the answer's first token."""
    text: str
    is_drafted: bool


@dataclass(frozen=True, slots=True)
class Answered:
    method: str
    typed: tuple[Typed, ...]
    token_ids: tuple[int, ...]
    num_rounds: int
    num_accepted: int
    seconds: float
    """From the first token to the last."""


@app.command(cls=Command)
def demo(
    prompt: Annotated[
        str | None, Argument(metavar="[PROMPT]", help="What to ask. Default: an embedded question of gsm8k.")
    ] = None,
    model: Annotated[str, Option(metavar="NAME", help="A name from 'dflash-bench models', or a folder.")] = "nano",
    method: Annotated[str, Option(metavar="NAME", help="How to draft, from 'dflash-bench methods'.")] = "dflash",
    max_new_tokens: Annotated[
        int, Option(metavar="N", min=1, max=MOST_TOKENS, help="Where an answer ends at the latest.")
    ] = 128,
) -> None:
    """Show drafting at work: one prompt, plain and drafted, side by side.

    Both are decoded first, and then typed at their measured times, slowed down if they are too fast to see. What the
    draft proposed and the target accepted is green; every other token is the target's own.
    """
    with Stages() as stages:
        stages.begin("starting")
        from dflash_bench.api.engine import Engine

        stages.begin(f"loading {model}")
        with Engine(model) as engine:
            asked = prompt or _question()
            for name in (BASELINE, method):
                stages.begin(f"warming up {shown(name)}")
                engine.generate(asked, name, max_new_tokens=min(max_new_tokens, 16))
            stages.begin("answering")
            plain, drafted = (_answered(engine, asked, name, max_new_tokens) for name in (BASELINE, method))
    say(f"{_paragraphs(asked)}\n")
    if sys.stdout.isatty():
        _play(plain, drafted)
    else:
        for one in (plain, drafted):
            say(f"{_head(one)}\n{_shown(one).plain}\n")
    say(_paragraphs(_verdict(plain, drafted)))


def _paragraphs(text: str) -> str:
    return "\n".join(wrapped(line, wide(), others="") for line in text.splitlines())


def _question() -> str:
    from dflash_bench.tasks import suites

    return suites.load_prompts(suites.known_suites()["gsm8k"], "embedded", 1).prompts[0].turns[0]


def _answered(engine: Engine, prompt: str, method: str, max_new_tokens: int) -> Answered:
    if engine.tokenizer is None:
        raise UserError("this model has no tokenizer, so its answers cannot be shown")
    from dflash_bench.api.engine import UNFINISHED

    reply = engine.generate(prompt, method, max_new_tokens=max_new_tokens)
    typed: list[Typed] = []
    tokens: list[int] = []
    shown = ""
    for part, at_s, is_drafted in [(reply.token_ids[:1], 0.0, False), *_parts(reply)]:
        tokens += part
        text = engine.tokenizer.decode(tokens, skip_special_tokens=True).rstrip(UNFINISHED)
        typed.append(Typed(at_s, text[len(shown) :], is_drafted))
        shown = text
    accepted = sum(step.accepted for step in reply.rounds)
    return Answered(reply.method, tuple(typed), reply.token_ids, len(reply.rounds), accepted, reply.decode_s)


def _parts(reply: Any) -> Iterator[tuple[Sequence[int], float, bool]]:
    """Yield each round's draft tokens and the target's own token, with the end of the round."""
    now_s = 0.0
    for step in reply.rounds:
        now_s += step.seconds or 0.0
        yield step.token_ids[: step.accepted], now_s, True
        yield step.token_ids[step.accepted :], now_s, False


def _shown(one: Answered, until_s: float = float("inf")) -> Text:
    """Return the text typed so far; without colours, brackets stand around drafted text."""
    from rich.text import Text

    text, in_colour = Text(), sys.stdout.isatty()
    for part in one.typed:
        if part.at_s <= until_s and part.text:
            drafted = part.is_drafted and part.text.strip()
            words = visible(part.text, keep="\n")
            text.append(f"[{words}]" if drafted and not in_colour else words, "green" if drafted else "")
    return text


def _head(one: Answered) -> str:
    rounds = f"{one.num_rounds} passes" if one.method == BASELINE else f"{one.num_rounds} rounds"
    return f"{_name(one)}: {one.seconds:.2f} s, {rounds}"


def _name(one: Answered) -> str:
    return shown(one.method)


def _play(plain: Answered, drafted: Answered) -> None:
    """Type both answers at their measured times, slowed by a factor that the title states."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    width = terminal_width(160)
    slowest = max(plain.seconds, drafted.seconds, 1e-6)
    factor = max(1.0, LENGTH_S / slowest)
    title = f"slowed down {factor:.0f}x" if factor >= 2 else "at the measured speed"

    def frame(until_s: float) -> Group:
        both = [
            Panel(_shown(one, until_s), title=_head(one) if one.seconds <= until_s else _name(one), title_align="left")
            for one in (plain, drafted)
        ]
        if width < NARROW:
            return Group(*both, Text(title, "dim"))
        table = Table.grid(expand=True, padding=(0, 1))
        table.add_column(ratio=1)
        table.add_column(ratio=1)
        table.add_row(*both)
        return Group(table, Text(title, "dim"))

    begun_s = time.monotonic()
    with Live(frame(0.0), console=Console(width=width), auto_refresh=False) as live:
        while (now_s := (time.monotonic() - begun_s) / factor) < slowest:
            live.update(frame(now_s), refresh=True)
            time.sleep(FRAME_S)
        live.update(frame(float("inf")), refresh=True)


def _verdict(plain: Answered, drafted: Answered) -> str:
    same = plain.token_ids == drafted.token_ids
    alike = "the same tokens" if same else "NOT the same tokens, so it counts for nothing"
    per_round = (drafted.num_accepted + drafted.num_rounds) / max(drafted.num_rounds, 1)
    times = plain.seconds / max(drafted.seconds, 1e-9)
    return (
        f"{drafted.method} took {drafted.seconds:.2f} s and plain decoding {plain.seconds:.2f} s: "
        f"{times:.2f} times as fast here, {per_round:.1f} tokens per round, {alike}.\n"
        "That is one prompt, measured once. For a number: dflash-bench run --suite math --method dflash"
    )
