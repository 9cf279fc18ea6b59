"""Keys and passwords: values printed as stars, and command lines and texts with secrets removed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Self
from urllib.parse import quote, unquote

from dflash_bench.core.errors import UserError

HIDDEN = "***"
LEAST = 4
"""Shortest secret, in characters, that is hidden in texts; shorter ones occur in every other word."""
OF_VARIABLES = 8
"""The same for the value of a variable, whose name is the only hint that it is a secret."""


class _Hidden:
    """A value that can be compared, but neither copied nor stored."""

    __slots__ = ("_value",)
    _value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __deepcopy__(self, _: object) -> Self:
        return self

    def __reduce__(self) -> str:
        raise TypeError("secrets, and arguments that may contain some, are not stored")


class Secret(_Hidden):
    """A text that only `reveal` returns: it prints as stars, also inside containers, and cannot be stored."""

    __slots__ = ()
    _value: str

    def __init__(self, text: str) -> None:
        self._value = text

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return HIDDEN

    @property
    def forms(self) -> set[str]:
        """Return its spellings: plain, in JSON, in Python, in a URL."""
        text = self._value
        forms = {text, json.dumps(text)[1:-1], repr(text)[1:-1], quote(text), quote(text, safe=""), unquote(text)}
        return {form for form in forms if len(form) >= LEAST}


def hidden(text: str, secrets: Iterable[Secret]) -> str:
    """Replace each secret in the text by stars, the longest first, since one may be part of another."""
    forms = {form for secret in secrets for form in secret.forms}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return text


class Arguments(_Hidden):
    """Arguments of a command line, some of which may contain secrets; it prints without them, quoted for a shell."""

    __slots__ = ("secrets", "shown")
    _value: tuple[str, ...]

    def __init__(self, words: Sequence[str]) -> None:
        self._value = tuple(words)
        self.secrets: tuple[Secret, ...] = ()
        """Secrets found by the names of options and by the shapes of values."""
        self.shown: tuple[str, ...] = ()
        """The arguments with stars in place of secrets."""
        option = ""
        for word in self._value:
            # The next word is the option's value, whatever it begins with.
            is_option = option not in OF_COMMANDS and word.startswith("-") and not word.lstrip("-")[:1].isdigit()
            name, equals, value = word.partition("=")
            if is_option:
                option = "" if equals else name
            if is_option and equals:
                self._add(f"{name}=", value, name)
            elif is_option:
                self._add("", word, "")
            else:
                self._add("", word, option)
                option = "" if option in OF_COMMANDS else option

    def _add(self, before: str, word: str, option: str) -> None:
        """Add a word; `option` is the option whose value it is, if any."""
        if option in OF_COMMANDS:
            shown, found = _of_command(word)
        elif word and (option in SHORT or _names_secret(option.lstrip("-"))):
            shown, found = HIDDEN, (word,)
        else:
            shown, found = _by_shape(word)
        self.shown += (before + shown,)
        self.secrets += tuple(map(Secret, found))

    def reveal(self) -> list[str]:
        return list(self._value)

    def value_of(self, option: str) -> Secret | None:
        """Return the first value of an option such as --api-key."""
        for word, after in zip(self._value, (*self._value[1:], ""), strict=True):
            if word == option and after:
                return Secret(after)
            if word.startswith(f"{option}="):
                return Secret(word.partition("=")[2])
        return None

    def __str__(self) -> str:
        return " ".join(word if word == HIDDEN else shlex.quote(word) for word in self.shown)

    def __repr__(self) -> str:
        return f"Arguments({self})"


SHORT = frozenset(("-k",))
"""Short flags that servers use for an API key; another meaning, such as top-k, is hidden with it."""
OF_COMMANDS = frozenset(("--launch-args",))
"""Options whose value is itself a command line."""


def arguments(text: str, option: str) -> Arguments:
    """Split an option's value as a shell does. Raises UserError for a quote that is not closed."""
    try:
        return Arguments(shlex.split(text))
    except ValueError as error:
        raise UserError(f"{option}: {error}; quote it as in a shell") from error


def command(words: Sequence[str]) -> str:
    """Return the command as typed, without secrets, to be stored and shown."""
    return f"dflash-bench {Arguments(words)}".rstrip()


def of_environment(variables: Mapping[str, str]) -> tuple[Secret, ...]:
    """Return secrets in the environment that programs may print: variables named like secrets, proxies' passwords."""
    named = [
        value
        for name, value in variables.items()
        # PWD is the working directory.
        if name != "PWD" and len(value) >= OF_VARIABLES and _names_secret(name.rstrip("_"))
    ]
    proxies = [variables[name] for name in variables if name.lower().endswith("_proxy")]
    return tuple(map(Secret, [*named, *(found for text in proxies for found in _by_shape(text)[1])]))


_LAST = frozenset(
    "apikey auth authorization bearer credential credentials key pass passphrase passwd password pwd secret secrets "
    "token".split()
)
_NO_KEYS = frozenset("pad mask eos bos unk sep cls image audio video stop start end special sort cache".split())
"""Words before "token" and "key" that belong to models."""


def _names_secret(name: str) -> bool:
    """Return whether a name suggests a secret: `--api-key` and HF_TOKEN do, `--max-tokens` does not."""
    parts = [part for part in re.split(r"[^a-z0-9]+", name.lower()) if part]
    return bool(parts) and parts[-1] in _LAST and (len(parts) == 1 or parts[-2] not in _NO_KEYS)


_SHAPES = (
    re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://(?P<secret>[^\s/?#@]*(?:@[^\s/?#@]*)*)@"),
    re.compile(r"(?i)\b(?:bearer|basic)\s+(?P<secret>[^\s\"',;]+)"),
    re.compile(r"""(?i)(?P<name>[a-z0-9_-]+)["']?\s*[:=]\s*(?P<quote>["']?)(?P<secret>[^\s"'&;,{}\[\]]+)"""),
    re.compile(r"\b(?P<secret>(?:sk|pk|hf|ghp|gho|ghs|glpat|xox[abp]|github_pat)[-_][A-Za-z0-9_-]{8,})"),
)
"""Passwords in URLs, authorization headers, query and JSON fields, and tokens of well-known services."""


def _by_shape(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the text without anything that looks like a secret, and these secrets."""
    found: list[str] = []

    def star(match: re.Match[str]) -> str:
        groups = match.groupdict()
        secret, name = groups["secret"], groups.get("name")
        if name is not None and (not _names_secret(name) or secret.lower() in ("bearer", "basic")):
            return match[0]
        if secret == HIDDEN:
            return match[0]
        # In user:password, the password alone is a secret, too.
        found.extend(part for part in (secret, secret.partition(":")[2]) if part)
        start = match.start("secret") - match.start()
        return match[0][:start] + HIDDEN + match[0][start + len(secret) :]

    for shape in _SHAPES:
        text = shape.sub(star, text)
    return text, tuple(found)


def _of_command(text: str) -> tuple[str, tuple[str, ...]]:
    """Do the same for a command line within a word; if it cannot be parsed, hide it as a whole."""
    try:
        inner = Arguments(shlex.split(text))
    except ValueError:
        return HIDDEN, (text,)
    return str(inner), tuple(secret.reveal() for secret in inner.secrets)
