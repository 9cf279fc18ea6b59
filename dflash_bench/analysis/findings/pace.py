"""Is plain decoding as fast as its own forward passes allow? A slow baseline flatters every method."""

from __future__ import annotations

from dflash_bench.analysis import width_curve
from dflash_bench.analysis.findings.case import Case, Seen
from dflash_bench.analysis.width_curve import SLOW_PLAIN


def slow_plain(case: Case) -> Seen | None:
    if not case.is_baseline or case.cell.settings.is_shared:
        return None
    pace = width_curve.pace_of(case.info, case.good)
    if pace is None or pace.ratio <= SLOW_PLAIN:
        return None
    text = (
        "plain decoding is slower than its own forward passes allow: speed-ups are flattered; a round takes "
        f"{1000 * pace.round_s:.3g} ms, and a pass over one token {1000 * pace.pass_s:.3g} ms"
    )
    remedy = "keep the machine free of other work, and run again; if it stays, find out what the rest of a round is"
    return case.seen_in_suite("slow_plain", text, remedy, round_s=pace.round_s, pass_s=pace.pass_s)
