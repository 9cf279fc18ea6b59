"""Measure speculative decoding honestly: acceptance, speed and token-for-token exactness.

    import dflash_bench as db

    run = db.run(model="nano", suite="gsm8k", methods=["dflash", "eagle3"], limit=8)
    print(run)

The public names are those of `__all__`; what they are, and what is promised of them, stands in `dflash_bench.api`. Each
is imported when it is first used: reading a run loads neither torch nor transformers.
"""

from importlib import import_module

__version__ = "1.0.0rc1"
__all__ = [
    "CheckResult",
    "Compared",
    "Engine",
    "Recommended",
    "Reply",
    "ReplyStream",
    "Run",
    "UserError",
    "check",
    "compare",
    "crosscheck",
    "doctor",
    "inspect",
    "load",
    "profile",
    "recommend",
    "run",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'dflash_bench' has no attribute '{name}'")
    return getattr(import_module("dflash_bench.api"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
