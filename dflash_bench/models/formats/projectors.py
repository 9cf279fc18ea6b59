"""z-lab's DFlash with a correction head: SpecForge's DSpark and Domino, NVIDIA's LiLiCorr.

`dflash_config.projector_type` names the head. SpecForge's heads have shifted labels, DSpark always and Domino by
`shift_label`; embedding and head are left to the target.
"""

from __future__ import annotations

from typing import Any

from dflash_bench.core.errors import UserError
from dflash_bench.models.formats import heads, zlab
from dflash_bench.models.formats.base import Checkpoint, Format, Json, Stored, Tensors
from dflash_bench.models.nets.corrections.base import CorrectionConfig
from dflash_bench.models.nets.corrections.domino import DominoConfig
from dflash_bench.models.nets.corrections.lilicorr import LiLiCorrConfig
from dflash_bench.models.nets.corrections.markov import MarkovConfig
from dflash_bench.models.nets.dflash import DFlashConfig


def read_specforge(config: Json, tensors: Tensors, depth: int | None) -> Checkpoint:
    tensors = heads.newer_names(tensors)
    if heads.projector_of(config) == "domino":
        domino = heads.domino(config)
        shifted = heads.both_levels(config)["shift_label"]
        read = zlab.read_dflash(heads.without(config, DominoConfig), tensors, depth)
        # With shifted labels the last slot could draft, too; SpecForge's own generator omits it.
        return heads.with_head(read, domino, shifted_labels=shifted, last_slot_idle=shifted)
    markov = heads.markov(config, tensors)
    read = zlab.read_dflash(heads.without(config, MarkovConfig), tensors, depth)
    return heads.with_head(read, markov, shifted_labels=True)


def read_nvidia(config: Json, tensors: Tensors, depth: int | None) -> Checkpoint:
    lilicorr = heads.lilicorr(config)
    read = zlab.read_dflash(heads.without(config, LiLiCorrConfig), tensors, depth)
    return heads.with_head(read, lilicorr)


def write_specforge(checkpoint: Checkpoint) -> Stored:
    config = _with_head("specforge", checkpoint, MarkovConfig, DominoConfig)
    if isinstance(config.correction, DominoConfig):
        labels = {"shift_label": config.shifted_labels}
        return _written(checkpoint, config.correction, "DominoDraftModel", labels)
    if not config.shifted_labels:
        raise UserError("the specforge format cannot hold this draft's infill_labels")
    assert config.correction is not None
    return _written(checkpoint, config.correction, "DSparkDraftModel", {})


def write_nvidia(checkpoint: Checkpoint) -> Stored:
    config = _with_head("nvidia", checkpoint, LiLiCorrConfig)
    assert config.correction is not None
    return _written(checkpoint, config.correction, "LiLiCorrDraftModel", {})


def _with_head(name: str, checkpoint: Checkpoint, *kinds: type[CorrectionConfig]) -> DFlashConfig:
    config = checkpoint.config
    assert isinstance(config, DFlashConfig)
    heads.cannot_hold(name, config, *kinds)
    if config.correction is None:
        known = " or ".join(kind.kind for kind in kinds)
        raise UserError(f"the {name} format holds drafts with the head of {known}, and this one has none; use zlab")
    return config


def _written(checkpoint: Checkpoint, correction: CorrectionConfig, architecture: str, labels: dict[str, Any]) -> Stored:
    written, tensors = zlab.write_dflash(heads.without_head(checkpoint))
    keys = heads.json_of(correction) | labels | {"projector_type": heads.PROJECTORS[architecture]}
    return written | {"architectures": [architecture], heads.INNER: {**written[heads.INNER], **keys}}, tensors


SPECFORGE = Format("specforge", "dflash", read_specforge, write_specforge, holds_vocabulary=False, reads_last=True)
NVIDIA = Format("nvidia", "dflash", read_nvidia, write_nvidia, holds_vocabulary=False, reads_last=True)
