"""From a preset to its target and drafts: loaded, checked against each other, pinned to their revisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dflash_bench import environment
from dflash_bench.errors import UserError
from dflash_bench.methods import Method
from dflash_bench.models import gguf, hub, language, networks, pairing, targets
from dflash_bench.models.folders import read_config
from dflash_bench.models.formats import TargetShape
from dflash_bench.models.language import PLAIN, Placement
from dflash_bench.models.presets import Preset, preset, require_drafts

TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model", "tokenizer_config.json")
"""A target that has none of these files has no tokenizer."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a target was read, and how, to be read again; `free_bytes` were free before that, None if unknown."""

    folder: Path
    device: str
    dtype: torch.dtype | str
    placement: Placement
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class Models:
    """Everything a backend needs, and what says which weights these were."""

    target: Any
    tokenizer: Any
    drafts: dict[str, Any]
    revisions: dict[str, str]
    verifiers: dict[str, str] = field(default_factory=dict)
    """Per draft that names it, the target it was made for; speculators checkpoints do."""
    source: Source | None = None
    """The target's; None for one that was not read from files."""

    def sharing_memory(self, num: int) -> Models:
        """As one of so many processes that load the same at the same time."""
        source = self.source
        if source is None or source.free_bytes is None:
            return self
        return replace(self, source=replace(source, free_bytes=source.free_bytes // num))

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
    needs_tokenizer: bool = True,
) -> Models:
    """The target and these drafts (`dflash`, `dflash@a`); dtype "auto" is the target checkpoint's, for the drafts too.

    Where no tokenizer is needed, a target without one has None. Raises UserError for whatever is missing, damaged or
    does not fit.
    """
    chosen = preset(model) if isinstance(model, str) else model
    require_drafts(chosen, drafts)
    fetched = {name: networks.fetch(name, chosen.drafts[name]) for name in drafts}
    place = str(gguf.converted(Path(chosen.target))) if gguf.is_file(chosen.target) else chosen.target
    checkpoint = hub.fetch(place, code=placement.trust_remote_code)
    language.check(checkpoint.folder, placement)
    tokenizer = None
    if needs_tokenizer or any((checkpoint.folder / name).exists() for name in TOKENIZERS):
        tokenizer = targets.tokenizer_of(checkpoint.folder, placement.trust_remote_code)
    source = Source(checkpoint.folder, device, dtype, placement, _free_bytes(device, placement.spread))
    target = language.load(checkpoint.folder, device, dtype, placement)
    models = Models(target, tokenizer, {}, {"target": checkpoint.revision}, {}, source)
    return _with_drafts(models, fetched)


def with_draft(models: Models, chosen: Preset, name: str) -> Models:
    """The same with this draft of the preset as well. Raises UserError as `load` does."""
    if name in models.drafts:
        return models
    require_drafts(chosen, [name])
    return _with_drafts(models, {name: networks.fetch(name, chosen.drafts[name])})


def _with_drafts(models: Models, fetched: Mapping[str, hub.LocalCheckpoint]) -> Models:
    target = models.target
    config, embedding = target.config.get_text_config(), target.get_input_embeddings().weight
    shape = TargetShape(config.hidden_size, embedding.shape[0], config.num_hidden_layers)
    vocabulary = models.tokenizer.get_vocab() if fetched and models.tokenizer is not None else {}
    loaded, verifiers = dict(models.drafts), dict(models.verifiers)
    for name, draft in fetched.items():
        if problem := pairing.other_tokenizer(draft.folder, vocabulary):
            raise UserError(f"{draft.folder}: {problem}")
        head = target.get_output_embeddings().weight
        loaded[name] = networks.load(name, draft.folder, shape, target.dtype, str(embedding.device), head)
        if named := pairing.verifier(read_config(draft.folder)):
            verifiers[name] = named
    revisions = models.revisions | {name: draft.revision for name, draft in fetched.items()}
    return replace(models, drafts=loaded, revisions=revisions, verifiers=verifiers)


def _free_bytes(device: str, spread: bool) -> int | None:
    if torch.device(device).type == "cpu":
        return environment.free_bytes()
    gpus = range(torch.cuda.device_count()) if spread else [torch.device(device)]
    return sum(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus)
