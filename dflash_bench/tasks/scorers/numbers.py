"""Answers that are numbers, compared by value: GSM8K's last number and AIME's integer.

Numbers are read as models write them: with separators and units, as a fraction, a mixed number or a power of ten,
with or without LaTeX. A box must contain one number: a formula or two candidates do not count as an answer.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Prompt
from dflash_bench.tasks.scorers.base import Score, Scorer, last_box, otherwise_right, reference

_MAX_NUMBER_CHARS = 100  # no answer is longer, and Python refuses to convert thousands of digits

_MINUS = r"(?:(?<![\w)}])-)?"  # not the minus of a difference
_NUMBER = re.compile(rf"{_MINUS}(?<![A-Za-z\d.])(?:\d+/0*[1-9]\d*|\d+(?:\.\d+)?|\.\d+)", re.ASCII)
_MARKED = re.compile(rf"####[\s*]*({_NUMBER.pattern})", re.ASCII)
_IN_A_RATIO = re.compile(r"\d:$", re.ASCII)
"""Precedes the second part of a ratio or a time, whose parts are not read as numbers."""
_COMMAND = re.compile(r"\\[A-Za-z]+")
_EQUALS = re.compile(r"=|≈|≡|→|\\(?:approx|equiv|to|rightarrow|Rightarrow|implies)(?![A-Za-z])")
_FORMULA = re.compile(
    r"\\(?:sqrt|pi|binom|frac|log|ln|exp|sin|cos|tan|infty|sum|prod|times|cdot|div|pm|mp|[lc]?dots)(?![A-Za-z])"
    r"|[!*+^√π×·±]|[\d)]\s*-\s*\d",
)
"""Signs that a box still contains an expression, after powers, fractions and signs were rewritten."""


def number(prompt: Prompt, text: str) -> Score:
    """Score the number in the last box, or else after the last `####`, or else the last number of the text."""
    right, box = right_number(prompt), last_box(text)
    answer = _last_number(text) if box is None else _only_number(box)
    return Score(answer or box or None, _same_number(answer, right))


def right_number(prompt: Prompt) -> str:
    """Return the number of a prompt's reference. Raises UserError if it contains no number."""
    text = reference(prompt)
    right = _last_number(text)
    if right is None or len(right) > _MAX_NUMBER_CHARS:
        where = f"prompt {prompt.prompt_id} of suite {prompt.suite}"
        raise UserError(f"{where}: its reference {text[:40]!r} contains no number; correct that row")
    return right


def _same_number(answer: str | None, right: str) -> bool:
    if answer is None or len(answer) > _MAX_NUMBER_CHARS:
        return False
    return Fraction(answer) == Fraction(right)


def _last_number(text: str) -> str | None:
    plain = _COMMAND.sub(" ", _plain(text))
    marked = _MARKED.findall(plain)
    if marked:
        return str(marked[-1])
    *_, last = (None, *_NUMBER.finditer(plain))
    return last[0] if last and not _IN_A_RATIO.search(plain, max(0, last.start() - 2), last.start()) else None


def _only_number(box: str) -> str | None:
    """Return the number after the last equals sign that a number follows; None for a formula or several numbers."""
    plain = _plain(re.sub(r"(?<!\d)\d{1,3}(?: \d{3})+(?!\d)", lambda match: match[0].replace(" ", ""), box))
    parts = [part for part in _EQUALS.split(plain) if _NUMBER.search(part)]
    if not parts:
        return None
    last = re.sub(r"^\s*([+-])\s*(?=[\d.])", lambda match: match[1].strip("+"), parts[-1])
    if _FORMULA.search(last):
        return None
    numbers = _NUMBER.findall(_COMMAND.sub(" ", last))
    values = {Fraction(digits) for digits in numbers if len(digits) <= _MAX_NUMBER_CHARS}
    return numbers[0] if len(values) == 1 else None


def _plain(text: str) -> str:
    """Rewrite numbers in LaTeX or typographic form so that `_NUMBER` matches them."""
    text = text.translate(_FULL_WIDTH)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def _fraction(match: re.Match[str]) -> str:
    """Rewrite a fraction, or a mixed number if an integer precedes it; return it unchanged if it is neither."""
    minus, whole = match["minus"] or "", match["whole"]
    top, bottom = (Fraction(match[name] or match[f"{name}_digit"]) for name in ("top", "bottom"))
    if not bottom or (whole and not 0 < top < bottom):
        return match[0]
    value = top / bottom + int(whole or 0)
    return f" {-value if minus else value} "


def _power(match: re.Match[str]) -> str:
    base, exponent = int(match["base"]), int(match["braced"] or match["exponent"])
    if not base and exponent < 0:
        return match[0]
    return str(Fraction(match["times"] or 1) * Fraction(base) ** exponent)


_FULL_WIDTH = {wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)}
"""East Asian full-width digits and signs, and their ASCII equivalents."""
_TEX_ARGUMENT = r"\s*(?:\{{\s*(?P<{0}>-?\d+(?:\.\d+)?)\s*\}}|(?P<{0}_digit>\d))"
_WHOLE = rf"(?:(?P<minus>{_MINUS})(?<![\d.^{{])(?P<whole>\d{{1,50}})\s*)?"
_MIXED = (
    rf"(?P<minus>{_MINUS})(?<![\d.^/])(?P<whole>\d{{1,50}}) {{1,4}}(?P<top>\d{{1,50}})/(?P<bottom>\d{{1,50}})(?![\d/])"
)
_MIXED += "(?P<top_digit>)(?P<bottom_digit>)"
_DECIMAL = r"\d{1,50}(?:\.\d{1,50})?"
_POWER = r"(?P<base>\d{1,4})\s*\^\s*(?:\{\s*(?P<braced>-?\d{1,2})\s*\}|(?P<exponent>-?\d{1,2}))(?!\d)"
_MODULUS = r"\(?\s{0,4}(?:\\[pb]?|(?<![A-Za-z]))mod(?:ulo)?\s{0,4}(?:\{\s{0,4}\d+\s{0,4}\}|\d+)\s{0,4}\)?"
_REWRITES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"[\u2212\u2013\ufe63\uff0d]"), "-"),
    (re.compile(r"[¼-¾⅐-⅞]"), lambda match: " " + unicodedata.normalize("NFKC", match[0]).replace("\u2044", "/")),
    (re.compile(r"\\(?:text\w*|math\w+|operatorname)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\(?:left|right)(?![A-Za-z])|\*\*|\\?[$%]|\\text(?:dollar|degree)(?![A-Za-z])"), ""),
    (re.compile(r"(?<=\d)(?:,|\{,\}|\\[,;:! ]|[~\u00a0\u2009\u202f])(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\\[,;:! ]|[~\u00a0\u2009\u202f]"), " "),
    (re.compile(_MODULUS), " "),
    (re.compile(r"\^\s*\{?\s*(?:\\circ|st|nd|rd|th)(?![A-Za-z])\s*\}?"), " "),
    (re.compile(r"(?<=[A-Za-z])\s?\^\s*(?:\{\s*-?\d\s*\}|-?\d)|_(?:\{\w+\}|\w)"), ""),  # of a unit: m^2, CO_2
    (re.compile(_WHOLE + r"\\[dtc]?frac" + _TEX_ARGUMENT.format("top") + _TEX_ARGUMENT.format("bottom")), _fraction),
    (re.compile(_MIXED), _fraction),
    (re.compile(rf"(?P<times>{_DECIMAL})\s*(?:\\times|\\cdot|[×·*])\s*" + _POWER.replace(r"\d{1,4}", "10")), _power),
    (re.compile(rf"(?P<times>)(?<![\w.}}]){_POWER}"), _power),
    (
        re.compile(rf"(?<![\w.])(?P<times>{_DECIMAL})[eE](?P<braced>[+-]?\d{{1,2}})(?!\w)(?P<base>)(?P<exponent>)"),
        lambda match: str(Fraction(match["times"]) * Fraction(10) ** int(match["braced"])),
    ),
)


def _check(prompt: Prompt) -> None:
    for one in (prompt, *otherwise_right(prompt)):
        right_number(one)


SCORER = Scorer(number, check=_check)
