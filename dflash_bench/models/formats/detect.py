"""Which format is this? Decided by the config and the names of tensors; unsupported kinds that we know are named."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from dflash_bench.errors import UserError
from dflash_bench.models.formats import deepspec, safeailab, speculators, zlab
from dflash_bench.models.formats.checkpoint import Format, Json

FORMATS = {
    (form.name, form.kind): form
    for form in (
        zlab.DFLASH, speculators.DFLASH, speculators.EAGLE3, deepspec.DFLASH, deepspec.EAGLE3, safeailab.EAGLE3,
    )
}  # fmt: skip
SPECULATORS = {"dflash": speculators.DFLASH, "eagle3": speculators.EAGLE3}
ARCHITECTURES = {
    "DFlashDraftModel": zlab.DFLASH,
    "Qwen3DSparkModel": deepspec.DFLASH,
    "Qwen3Eagle3Model": deepspec.EAGLE3,
}
UNSUPPORTED_ARCHITECTURES = {
    "DFlash2DraftModel": "DFlash 2",
    "DominoDraftModel": "Domino",
    "DSparkDraftModel": "DSpark",
    "QwenDFlareDraftModel": "DFlare",
    "LiLiCorrDraftModel": "LiLiCorr",
    "XPressDraftModel": "XPress",
    "PEagleDraftModel": "P-EAGLE",
    "Gemma4DSparkModel": "DeepSpec's DFlash for Gemma 4",
    "MuseGlimmerAssistantModel": "an assistant for transformers' own DFlash",
}
UNSUPPORTED_TENSORS = {
    r"candidate_selector\.|.*(attention|mlp)_conv\.": "DFlash 2",
    r"(logit_head\.)?(prefix_gru|embed_proj)\.": "Domino",
    r"layer_fusion_weights|.*\.[kv]_proj_target\.": "DFlare",
    r"markov_head\.": "DSpark",
    r"confidence_head\.": "DSpark with a confidence head",
    r"mask_hidden$": "P-EAGLE",
    r"lilicorr\.": "LiLiCorr",
    r"refiner_head\.": "XPress",
    r"encoder\.fc\.": "an assistant for transformers' own DFlash",
    r"\d+\.\d+\.linear\.": "Medusa",
}
LOOKED_FOR = (
    "config.json with speculators_model_type, dflash_config, draft_vocab_size or the architectures "
    f"{', '.join(ARCHITECTURES)}; tensors midlayer.* or d2t"
)


def detect(folder: Path, config: Json, names: Iterable[str]) -> Format:
    """The format of a folder. Raises UserError, with a name if we know one, for what is not supported."""
    names = list(names)
    architectures = config.get("architectures") or ()
    _refuse_unsupported(folder, config, architectures, names)
    if "speculators_model_type" in config:
        return _speculators(folder, config)
    for name in architectures:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if "dflash_config" in config:
        return zlab.DFLASH
    if "draft_vocab_size" in config or any(name == "d2t" or name.startswith("midlayer.") for name in names):
        return safeailab.EAGLE3
    raise UserError(f"{folder} is not a draft that we know; looked for {LOOKED_FOR}")


def _speculators(folder: Path, config: Json) -> Format:
    kind = config["speculators_model_type"]
    if kind not in SPECULATORS:
        raise UserError(
            f"{folder}: a speculators draft of type {kind!r} is not supported; only {', '.join(SPECULATORS)} are"
        )
    return SPECULATORS[kind]


def _refuse_unsupported(folder: Path, config: Json, architectures: Iterable[str], names: Iterable[str]) -> None:
    for architecture in architectures:
        if architecture in UNSUPPORTED_ARCHITECTURES:
            what = UNSUPPORTED_ARCHITECTURES[architecture]
            raise UserError(f"{folder} is {what} (architecture {architecture}), which is not supported")
    for name in names:
        for pattern, what in UNSUPPORTED_TENSORS.items():
            if re.match(pattern, name):
                raise UserError(f"{folder} is {what} (tensor {name}), which is not supported")
    if config.get("markov_rank"):
        raise UserError(f"{folder} is DSpark (markov_rank {config['markov_rank']}), which is not supported")
    if (folder / "mask_embedding.pt").exists():
        raise UserError(f"{folder} has its mask's embedding in mask_embedding.pt, which is not supported")
