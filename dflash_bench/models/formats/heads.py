"""Correction heads in files: keys, which several formats share, and tensors that identify them.

A head's keys are in `dflash_config` or beside it, by format; if in both places, the inner value is used. They are
removed from a config before the body is read, so that reading bodies is independent of heads, and refuses any key that
no head has taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from torch import Tensor

from dflash_bench.core.errors import UserError
from dflash_bench.models.formats.base import Checkpoint, DraftConfig, Json, Tensors
from dflash_bench.models.nets.corrections.base import CorrectionConfig
from dflash_bench.models.nets.corrections.domino import DominoConfig
from dflash_bench.models.nets.corrections.lilicorr import LiLiCorrConfig
from dflash_bench.models.nets.corrections.markov import MarkovConfig
from dflash_bench.models.nets.corrections.selector import SelectorConfig
from dflash_bench.models.nets.corrections.xpress import XPressConfig
from dflash_bench.models.nets.dflash import DFlashConfig

INNER = "dflash_config"
OTHER_KEYS: dict[type[CorrectionConfig], tuple[str, ...]] = {
    MarkovConfig: ("projector_type", "confidence_head_alpha"),
    DominoConfig: ("projector_type", "shift_label"),
    XPressConfig: ("xpress_num_passes",),
    LiLiCorrConfig: ("projector_type", "lilicorr_enabled"),
    SelectorConfig: (),
}
"""Keys that belong to a head but are not its fields."""
KEYS = frozenset(
    key for kind, others in OTHER_KEYS.items() for key in (*(field.name for field in fields(kind)), *others)
)
"""All keys of heads."""
TENSORS = {
    r"candidate_selector\.": "DFlash 2",
    r"markov_head\.": "DSpark",
    r"confidence_head\.": "DSpark",
    r"prefix_gru\.|embed_proj\.": "Domino",
    r"refiner_head\.": "XPress",
    r"lilicorr\.": "LiLiCorr",
}
"""Prefixes of names that only tensors of these kinds have."""
PROJECTORS = {
    "DSparkDraftModel": "dspark",
    "DominoDraftModel": "domino",
    "LiLiCorrDraftModel": "lilicorr",
}
"""Heads by architecture; older files are `DFlashDraftModel`, whatever their head."""
OLDER = "logit_head."
"""The prefix of heads' tensors in SpecForge's older files."""
NUM_CANDIDATES = 16
"""Default number of DFlash 2's candidates."""
NUM_PASSES = 6
"""Default number of XPress's passes."""


def projector_of(config: Json) -> str | None:
    """Return the head that a config names, or None. Raises UserError if it names two."""
    named = both_levels(config).get("projector_type")
    of_architecture = [PROJECTORS[name] for name in config.get("architectures") or () if name in PROJECTORS]
    for other in of_architecture:
        if named is not None and named != other:
            architectures = ", ".join(config["architectures"])
            raise UserError(f"config.json says {architectures} and projector_type {named!r}, which are different kinds")
        return other
    return named if named in PROJECTORS.values() else None


def without(config: Json, kind: type[CorrectionConfig]) -> dict[str, Any]:
    """Return the config without this head's keys, at both levels."""
    keys = {field.name for field in fields(kind)} | {*OTHER_KEYS[kind]}
    rest = {key: value for key, value in config.items() if key not in keys}
    if isinstance(inner := rest.get(INNER), Mapping):
        rest[INNER] = {key: value for key, value in inner.items() if key not in keys}
    return rest


def both_levels(config: Json) -> dict[str, Any]:
    return {**config, **(config.get(INNER) or {})}


def with_head(checkpoint: Checkpoint, correction: CorrectionConfig, **labels: Any) -> Checkpoint:
    """Return the checkpoint of a body with a head added; `labels` are fields of `DFlashConfig`."""
    assert isinstance(checkpoint.config, DFlashConfig)
    return replace(checkpoint, config=replace(checkpoint.config, correction=correction, **labels))


def without_head(checkpoint: Checkpoint) -> Checkpoint:
    """Return the body as a plain DFlash of infill labels, with the head's tensors."""
    assert isinstance(checkpoint.config, DFlashConfig)
    plain = replace(checkpoint.config, correction=None, shifted_labels=False, last_slot_idle=False)
    return replace(checkpoint, config=plain)


def json_of(correction: CorrectionConfig) -> dict[str, Any]:
    """Return a head's keys."""
    return asdict(correction)


def markov(config: Json, tensors: Tensors) -> MarkovConfig:
    """Read DSpark's head. Tensors decide what a config leaves open about its confidence head."""
    keys = both_levels(config)
    weight = tensors.get("confidence_head.proj.weight")
    enabled, with_markov = keys.get("enable_confidence_head"), keys.get("confidence_head_with_markov")
    head_type = keys.get("markov_head_type")
    if with_markov is None:
        with_markov = weight is None or weight.ndim != 2 or weight.shape[1] != keys["hidden_size"]
    return MarkovConfig(
        markov_rank=keys["markov_rank"],
        markov_head_type="vanilla" if head_type is None else head_type,
        enable_confidence_head=weight is not None if enabled is None else enabled,
        confidence_head_with_markov=with_markov,
    )


def selector(config: Json) -> SelectorConfig:
    """Read DFlash 2's selector."""
    keys = both_levels(config)
    top_k = keys.get("selector_top_k")
    return SelectorConfig(
        selector_rank=keys["selector_rank"], selector_top_k=NUM_CANDIDATES if top_k is None else top_k
    )


def domino(config: Json) -> DominoConfig:
    keys = both_levels(config)
    return DominoConfig(**{field.name: keys[field.name] for field in fields(DominoConfig)})


def xpress(config: Json) -> XPressConfig:
    passes = config.get("num_jacobi_passes", config.get("xpress_num_passes"))
    return XPressConfig(
        xpress_rank=config["xpress_rank"],
        xpress_mlp_ratio=_whole(config["xpress_mlp_ratio"]),
        num_jacobi_passes=NUM_PASSES if passes is None else passes,
    )


def lilicorr(config: Json) -> LiLiCorrConfig:
    """Read LiLiCorr's head. A hidden size of 0 or null is the body's; every other key is required."""
    keys = both_levels(config)
    if keys.get("lilicorr_enabled", True) is not True:
        raise UserError(f"a LiLiCorr draft with lilicorr_enabled = {keys['lilicorr_enabled']!r} is not supported")
    named = {field.name: keys[field.name] for field in fields(LiLiCorrConfig) if field.name != "lilicorr_hidden_size"}
    return LiLiCorrConfig(**named, lilicorr_hidden_size=keys.get("lilicorr_hidden_size") or keys["hidden_size"])


def _whole(value: Any) -> Any:
    """Return a whole number as an integer, and anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def newer_names(tensors: Tensors) -> dict[str, Tensor]:
    """Return tensors by the names of heads in newer files."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(OLDER)
        renamed[short if any(re.match(pattern, short) for pattern in TENSORS) else name] = tensor
    return renamed


def refuse_other_heads(config: DraftConfig, names: Iterable[str]) -> None:
    """Raise UserError for the first tensor of another kind of head than the config describes."""
    kind = config.kind if isinstance(config, DFlashConfig) else "EAGLE-3"
    for name in names:
        for pattern, other in TENSORS.items():
            if other != kind and re.match(pattern, name.removeprefix(OLDER)):
                raise UserError(
                    f"tensor {name} is of a draft of kind {other}, but config.json describes {kind}: "
                    "they do not belong together; copy the checkpoint again"
                )


def cannot_hold(name: str, config: DFlashConfig, *kinds: type[CorrectionConfig]) -> None:
    """Raise UserError for a head that is not of these `kinds`, as the format cannot hold it."""
    if config.correction is not None and not isinstance(config.correction, kinds):
        raise UserError(f"the {name} format cannot hold the head of a {config.kind} draft")
