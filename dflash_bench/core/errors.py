"""The error shown to users, and problems of a draft, which become such errors or findings."""

from dataclasses import dataclass


class UserError(Exception):
    """An error that states in one line what is wrong and what to do; the command line prints it and exits with 2.

    `remedy` is the second part alone, for callers that show the two separately.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what, self.remedy = what, remedy


class GpuMemoryError(UserError):
    """A GPU has too little free memory for an answer, or to judge it; the answer has failed, and others may not."""


def unknown(kind: str, name: str, known: list[str]) -> UserError:
    """Return the error for an unknown name, with the closest known name and the list of known names."""
    from difflib import get_close_matches

    guess = get_close_matches(name, known, n=1, cutoff=0.7)
    meant = f" (did you mean '{guess[0]}'?)" if guess else ""
    return UserError(f"unknown {kind} '{name}'{meant}; known: {', '.join(sorted(known))}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_panic(error: BaseException) -> bool:
    """Return whether it is a crash in Rust code, such as the tokenizers library; it does not derive from Exception."""
    return type(error).__name__ == "PanicException"


@dataclass(frozen=True, slots=True)
class DraftProblem:
    """A reason why a draft cannot be used with a target."""

    code: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}" if self.remedy else self.what


ANOTHER_DRAFT = "use a draft made for this target"
