"""The one kind of error that users are meant to see."""


class UserError(Exception):
    """What is wrong and what to do about it, in one line; the command line prints it and exits 2."""


def unknown(kind: str, name: str, known: list[str]) -> UserError:
    """The error for an unknown name; it lists the known ones."""
    return UserError(f"unknown {kind} '{name}'; known: {', '.join(sorted(known))}")
