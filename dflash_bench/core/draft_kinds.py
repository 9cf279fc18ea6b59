"""The kinds of drafts: ids as users type them, and names for display.

The kinds of the DFlash family share the method dflash; a checkpoint's config and tensors tell which kind it is.
"""

from __future__ import annotations

from dflash_bench.core.errors import unknown

DFLASH = "DFlash"
FAMILY = {
    "dflash": DFLASH,
    "jetspec": "JetSpec",
    "dflash2": "DFlash 2",
    "dspark": "DSpark",
    "domino": "Domino",
    "xpress": "XPress",
    "lilicorr": "LiLiCorr",
    "dflare": "DFlare",
}
"""Kinds of the method dflash."""
KINDS = FAMILY | {
    "eagle3": "EAGLE-3",
    "p-eagle": "P-EAGLE",
    "mtp": "MTP",
    "medusa": "Medusa",
    "draft-model": "draft model",
    "block-diffusion": "block diffusion",
}


def name_of_kind(kind: str) -> str:
    """Return the name of a kind; an unknown id is returned unchanged."""
    return KINDS.get(kind, kind)


def check_kind(kind: str, where: str) -> None:
    """Raise UserError for an unknown kind, with the list of kinds."""
    if kind not in KINDS:
        raise unknown(where, kind, list(KINDS))


def with_kind(method: str, kind: str | None) -> str:
    """Return `dflash (DFlash 2)`, or only the method if the kind is unknown."""
    return method if kind is None else f"{method} ({kind})"
