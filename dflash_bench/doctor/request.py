"""What a user asks of `doctor`, in the words of `run`, and what is wrong with that before anything is loaded."""

from __future__ import annotations

from dflash_bench.errors import UserError
from dflash_bench.methods import parse
from dflash_bench.run.option import check_options
from dflash_bench.run.request import Request

EXAMINED = ("dflash", "eagle3")


def has_prompts(request: Request) -> bool:
    """Without any, the draft is examined on ours."""
    return bool(request.suites or request.prompts)


def check(request: Request) -> None:
    """Raises UserError for what `run` would refuse too, and for a method without a draft that can be examined."""
    if len(request.methods) > 1:
        raise UserError("doctor examines one method at a time; give --method once")
    for text in request.methods:
        if text.partition("@")[0].partition(":")[0] not in EXAMINED:
            raise UserError(f"--method {text} has no draft that can be examined; {' and '.join(EXAMINED)} have")
        if others := parse(text).options.keys() - {"n", "block"}:
            raise UserError(f"doctor tries a draft with n= or block= alone; leave out {min(others)}=")
    if request.thinking == "both":
        raise UserError("doctor asks in one mode of thinking; give --thinking on or off")
    check_options(request)
