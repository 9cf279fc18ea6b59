"""The one kind of error that users are meant to see, and the problems of a draft that one may be made of."""

from dataclasses import dataclass


class UserError(Exception):
    """What is wrong and what to do about it, in one line; the command line prints it and exits 2.

    Where a caller shows the two apart, `remedy` is given by itself.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what, self.remedy = what, remedy


def unknown(kind: str, name: str, known: list[str]) -> UserError:
    """The error for an unknown name; it lists the known ones."""
    return UserError(f"unknown {kind} '{name}'; known: {', '.join(sorted(known))}")


@dataclass(frozen=True, slots=True)
class DraftProblem:
    """What keeps a draft from serving a target."""

    code: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}" if self.remedy else self.what


ANOTHER_DRAFT = "use a draft made for this target"
