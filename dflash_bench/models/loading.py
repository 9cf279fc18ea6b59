"""From a preset to its target and drafts: loaded, checked against each other, pinned to their revisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dflash_bench.errors import UserError
from dflash_bench.methods import Method
from dflash_bench.models import gguf, hub, language, networks, pairing, targets
from dflash_bench.models.folders import read_config
from dflash_bench.models.formats import TargetShape
from dflash_bench.models.language import PLAIN, Placement
from dflash_bench.models.layout import lay_out
from dflash_bench.models.presets import Preset, preset, require_drafts


@dataclass(frozen=True, slots=True)
class Models:
    """Everything a backend needs, and what says which weights these were."""

    target: Any
    tokenizer: Any
    drafts: dict[str, Any]
    revisions: dict[str, str]
    verifiers: dict[str, str] = field(default_factory=dict)
    """Per draft that names it, the target it was made for; speculators checkpoints do."""

    def draft_of(self, method: Method) -> Any:
        """The weights of a method that has some."""
        assert method.draft is not None, method.label
        return self.drafts[method.draft]


def load(
    model: str | Preset,
    drafts: Sequence[str],
    device: str,
    dtype: torch.dtype | str,
    placement: Placement = PLAIN,
) -> Models:
    """The target and these drafts (`dflash`, `dflash@a`); dtype "auto" is the target checkpoint's, for the drafts too.

    Raises UserError for whatever is missing, damaged or does not fit.
    """
    chosen = preset(model) if isinstance(model, str) else model
    require_drafts(chosen, drafts)
    fetched = {name: networks.fetch(name, chosen.drafts[name]) for name in drafts}
    place = str(gguf.converted(Path(chosen.target))) if gguf.is_file(chosen.target) else chosen.target
    checkpoint = hub.fetch(place, code=placement.trust_remote_code)
    language.check(checkpoint.folder, placement)
    tokenizer = targets.tokenizer_of(checkpoint.folder, placement.trust_remote_code)
    target = language.load(checkpoint.folder, device, dtype, placement)
    config, embedding = target.config.get_text_config(), target.get_input_embeddings().weight
    shape = TargetShape(config.hidden_size, embedding.shape[0], config.num_hidden_layers)
    vocabulary = tokenizer.get_vocab() if fetched else {}
    lay_out(target)
    loaded, verifiers = {}, {}
    for name, draft in fetched.items():
        if problem := pairing.other_tokenizer(draft.folder, vocabulary):
            raise UserError(f"{draft.folder}: {problem}")
        head = target.get_output_embeddings().weight
        loaded[name] = networks.load(name, draft.folder, shape, target.dtype, str(embedding.device), head)
        lay_out(loaded[name])
        if named := pairing.verifier(read_config(draft.folder)):
            verifiers[name] = named
    revisions = {"target": checkpoint.revision} | {name: draft.revision for name, draft in fetched.items()}
    return Models(target, tokenizer, loaded, revisions, verifiers)
