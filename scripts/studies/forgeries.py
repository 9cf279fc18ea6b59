"""Which forged runs does `accept` refuse, and how often does its draw miss answers that were forged?

A run is measured once and then changed with care for everything else that a reader checks. Small forgeries are accepted
again and again, with the draw that is used if nobody asks for more. Two more honest runs tell how far times and
rounding alone lead.
"""

from __future__ import annotations

import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from dflash_bench.core.types import Answer
from dflash_bench.report.tables import markdown
from dflash_bench.results import pack, store
from dflash_bench.results.recheck import Recheck
from dflash_bench.results.run_info import read_info
from dflash_bench.runner.setup import open_local
from dflash_bench.submissions import accept as accepting
from dflash_bench.submissions import checks
from dflash_bench.submissions.accept import accept
from dflash_bench.submissions.checks import Redone
from dflash_bench.submissions.request import AcceptRequest
from helpers.forging import FORGERIES, Info, Rows, forge, other_token
from studies._study import Made, Work, tell

TAKES = "ten minutes of one core"
PAGES = ("exactness/forgeries.md",)
METHODS = ("dflash", "ngram")
DRAWS = 1000
OF_HONEST = ["method", "what", "found", "bound", "doubted, or other"]
SHARES = (0.02, 0.05, 0.1, 0.25)
HEAD = """# Forged runs

```
{command}
```

{machine}.

A run of nano with DFlash and ngram on gsm8k (embedded), {prompts} prompts and {answers} answers, as it was measured and
forged in {num} ways; `accept` recomputed all answers.

{table}

## Forged answers that the draw misses

In each of {seeds} copies, another random share of answers has another token, the same by every method. `accept` draws
{drawn} of {answers} answers, its least; `expected` is the share of draws without one of the forged answers.
The token is in the answer's middle, where no score sees it.

{missed}

## How honest runs differ

The same run measured again, and in bfloat16; of the answers with the same tokens. Times are a method's beside plain
decoding's, as ratios of the two float32 runs, in {draws} draws of {drawn} answers with {least} of each, and how many
draws `accept` would doubt. Tokens per round are those in float32 and in bfloat16, and how many answers have other
rounds; on another kind of machine `accept` refutes a larger difference than the bound.

{honest}
"""


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--limit", type=int, default=32, help="prompts")
    parser.add_argument("--seeds", type=int, default=20, help="draws for each share")


def make(work: Work, options: Namespace) -> Made:
    words = ["--model", "nano", "--suite", "gsm8k", "--limit", options.limit, "--max-new-tokens", 48, "--threads", 1]
    words += [word for method in METHODS for word in ("--method", method)]
    run = work.run("honest", *words)
    others = [work.run("again", *words), work.run("rounded", *words, "--dtype", "bfloat16")]
    rows, wrong = [], []
    with _one_engine():
        honest = _rechecked(run, work.folder, 1.0, 1)
        rows.append(["nothing", "", _verdict(honest), _doubts(honest)])
        for forgery in FORGERIES:
            found = _forged(run, work.folder, forgery.rows, forgery.info, 1.0, 1)
            state = next((one.state for one in found.findings if one.check == forgery.check), "not reached")
            rows.append([forgery.name, forgery.check, _verdict(found), _doubts(found)])
            # On a busy machine the honest run's own times are doubtful.
            known = {forgery.state, *(["doubtful"] if forgery.check == "times" else [])}
            wrong += [f"{forgery.name}: {forgery.check} is {state}"] if state not in known else []
            tell("  ".join(rows[-1]))
        missed = [_missed(run, work.folder, share, options.seeds, honest.num_answers) for share in SHARES]
    wrong += ["an honest run was refused"] if not honest.is_accepted else []
    page = HEAD.format(
        command=work.command,
        machine=read_info(run).environment.one_line(),
        prompts=options.limit,
        answers=honest.num_answers,
        num=len(FORGERIES),
        table=markdown(["what is forged", "found by", "verdict", "doubtful"], rows, left=4),
        seeds=options.seeds,
        drawn=accepting.LEAST_DRAWN,
        missed=markdown(["forged answers", "accepted", "expected"], missed, left=0),
        draws=f"{DRAWS:,}",
        least=checks.LEAST_TIMED,
        honest=markdown(OF_HONEST, list(_honest(run, *others)), left=2),
    )
    return Made({PAGES[0]: page}, wrong)


@contextmanager
def _one_engine() -> Iterator[None]:
    """Load nano once for all runs: what is loaded does not depend on what is forged."""
    measure = accepting.Here.forwards
    engines: dict[int, Any] = {}
    measured: list[Any] = []

    def opened(resolved: Any) -> Any:
        if resolved.max_new_tokens not in engines:
            engines[resolved.max_new_tokens] = open_local(resolved)
        return engines[resolved.max_new_tokens]

    def forwards(here: accepting.Here) -> Any:
        if not measured:
            measured.append(measure(here))
        return measured[0]

    with (
        patch.object(accepting, "open_local", opened),
        patch.object(accepting.Here, "forwards", forwards),
        patch.object(pack, "read_run", lambda _: None),  # a forger packs what no reader would take
    ):
        yield


def _rechecked(run: Path, folder: Path, share: float, seed: int) -> Recheck:
    file, out = folder / "pack.zip", folder / "accepted"
    shutil.rmtree(out, ignore_errors=True)
    pack.write(run, file)
    return accept(AcceptRequest(file, share=share, seed=seed), out, lambda _: None)


def _forged(run: Path, folder: Path, rows: Rows, info: Info, share: float, seed: int) -> Recheck:
    out = folder / "forged"
    shutil.rmtree(out, ignore_errors=True)
    return _rechecked(forge(run, out, rows, info), folder, share, seed)


def _missed(run: Path, folder: Path, share: float, num_seeds: int, num_answers: int) -> list[str]:
    """Return the share of forged answers, how many draws accepted the run, and how many should."""
    num_accepted, expected = 0, 0.0
    for seed in range(num_seeds):
        chosen: set[str] = set()

        def change(rows: list[Answer], seed: int = seed, chosen: set[str] = chosen) -> Sequence[Answer]:
            prompts = list(dict.fromkeys(row.prompt_id for row in rows))
            chosen |= {*Random(seed).sample(prompts, max(1, round(share * len(prompts))))}
            return [other_token(row) if row.prompt_id in chosen else row for row in rows]

        found = _forged(run, folder, change, lambda _: None, 0.0, seed)
        num_accepted += found.is_accepted
        num_forged = len(chosen) * num_answers // _num_prompts(run)
        expected += _chance(num_answers, num_forged, min(num_answers, accepting.LEAST_DRAWN))
    return [f"{100 * share:.0f} %", f"{num_accepted} of {num_seeds}", f"{100 * expected / num_seeds:.0f} %"]


def _honest(run: Path, again: Path, rounded: Path) -> Iterator[list[str]]:
    """Yield a row for each method: how times and tokens per round differ between honest runs."""
    timed, other = _pairs(run, again), _pairs(run, rounded)
    draws = [Random(seed).sample(timed, accepting.LEAST_DRAWN) for seed in range(DRAWS)]
    for method in METHODS:
        same = [one for one in other if one.stored.method == method and one.has_same_tokens]
        lengths = [checks.per_round(one.stored.generation for one in same), checks.per_round(one.again for one in same)]
        num = sum(checks.rounds_of(one.stored.generation) != checks.rounds_of(one.again) for one in same)
        for what, (seconds, most) in checks.BESIDE_PLAIN.items():
            found = [checks.beside_plain(draw, seconds) for draw in draws]
            own = sorted(ratio for one in found for (label, _), ratio in one.items() if label == method)
            doubted = sum(not 1 / most <= one <= most for one in own)
            yield [
                method, what, f"{own[0]:.2f} to {own[-1]:.2f}", f"{1 / most:.2f} to {most:.2f}",
                f"{doubted} of {len(own)}",
            ]  # fmt: skip
        counts = " and ".join(f"{one:.2f}" for one in lengths)
        yield [method, "tokens per round", counts, f"{100 * checks.OFF_LENGTH:.0f} %", f"{num} of {len(same)}"]


def _pairs(run: Path, other: Path) -> list[Redone]:
    """Pair the answers of two runs as stored and regenerated."""
    again = {store.key(answer): answer.generation for answer in store.load(other)[1]}
    return [Redone(one, again[store.key(one)], is_judged=True) for one in store.load(run)[1]]


@cache
def _num_prompts(run: Path) -> int:
    return len({answer.prompt_id for answer in store.load(run)[1]})


def _chance(num: int, num_forged: int, drawn: int) -> float:
    """Return the chance that a draw without replacement has no forged answer (hypergeometric)."""
    from scipy.stats import hypergeom

    return float(hypergeom.pmf(0, num, num_forged, drawn))


def _verdict(record: Recheck) -> str:
    return "accepted" if record.is_accepted else "refused"


def _doubts(record: Recheck) -> str:
    return ", ".join(one.check for one in record.of_state("doubtful"))
