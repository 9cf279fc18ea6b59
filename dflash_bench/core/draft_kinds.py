"""The kinds of drafts: ids as a user types them, names as people know them.

The kinds of the DFlash family share the method dflash; which one a checkpoint is, its config and tensors say.
"""

from __future__ import annotations

from dflash_bench.core.errors import unknown

DFLASH = "DFlash"
FAMILY = {
    "dflash": DFLASH, "jetspec": "JetSpec", "dflash2": "DFlash 2", "dspark": "DSpark", "domino": "Domino",
    "xpress": "XPress", "lilicorr": "LiLiCorr", "dflare": "DFlare",
}  # fmt: skip
"""Kinds of the method dflash."""
KINDS = FAMILY | {
    "eagle3": "EAGLE-3", "p-eagle": "P-EAGLE", "mtp": "MTP", "medusa": "Medusa", "draft-model": "draft model",
    "block-diffusion": "block diffusion",
}  # fmt: skip


def name_of_kind(kind: str) -> str:
    """Return the name of a kind, or an id that is not known as it is."""
    return KINDS.get(kind, kind)


def check_kind(kind: str, where: str) -> None:
    """Raises UserError for an id that is no kind; it lists the kinds."""
    if kind not in KINDS:
        raise unknown(where, kind, list(KINDS))


def with_kind(method: str, kind: str | None) -> str:
    """Return `dflash (DFlash 2)`, or the method alone where no kind is known."""
    return method if kind is None else f"{method} ({kind})"
