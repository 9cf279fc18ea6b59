"""The judge's own copy of a target: weights, tokenizer, template and stop ids, read directly from the files.

A fault may be in the code that loads, lays out and computes the engine's target, so the judge shares none of it: it has
its own modules, without our hooks. Its weights are read again: all at once if memory allows, else layer by layer in
each of its passes. If neither is possible, it shares the weights of the engine's forward pass; checksums taken before
they are laid out, afterwards and at the end detect any change since loading.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import (
    OWN_WEIGHTS,
    SHARED_WEIGHTS,
    STREAMED_WEIGHTS,
    Divergence,
    Message,
    Settings,
    template_input,
)
from dflash_bench.engine.judge import Judge
from dflash_bench.models import memory, parallel, quantization
from dflash_bench.models.hub import UNREADABLE, cannot_load
from dflash_bench.models.loading import Models, Source
from dflash_bench.models.targets import config_of, with_template
from dflash_bench.models.weights import twin

OTHER_PROMPT = "the prompt is not what the template and tokenizer in the target's files make of the messages"
ALWAYS = 1 << 30
"""Weights up to this many bytes are always read twice."""
MARGIN = 8
"""1 / MARGIN of the free memory is left for activations."""
BLOCK = 1024
"""Number of columns of the matrix as which a checksum reads the bytes of a tensor."""


@dataclass(frozen=True, slots=True)
class Words:
    """Tokenizer and stop ids. `tokenizer` is None without files to read it from; prompts are then trusted."""

    tokenizer: Any
    stop_ids: frozenset[int]
    """Every id that ends an answer."""


class ChatJudge:
    """Judges answers to chats. `weights` is OWN_WEIGHTS, STREAMED_WEIGHTS or SHARED_WEIGHTS."""

    def __init__(
        self,
        model: Callable[[], Any],
        words: Callable[[], Words],
        max_new_tokens: int,
        shared: nn.Module | None = None,
        weights: str = OWN_WEIGHTS,
    ) -> None:
        """`model` and `words` are read on first use; `shared` is the model whose weights the engine reads, too."""
        self.max_new_tokens, self.weights = max_new_tokens, weights if shared is None else SHARED_WEIGHTS
        self.objections: dict[str, int] = {}
        """Faults other than wrong tokens, with the number of answers affected."""
        self._model, self._words, self._shared = model, words, shared
        self._sums = {} if shared is None else checksums(shared)

    @cached_property
    def judge(self) -> Judge:
        """Return the judge of answers to prompts of token ids. Raises UserError if its weights cannot be read."""
        return Judge(self._model(), self.words.stop_ids, self.max_new_tokens)

    @property
    def loaded(self) -> nn.Module | None:
        """Return the judge's modules; None if nothing has used them yet."""
        model: nn.Module | None = self.judge.model if "judge" in vars(self) else None
        return model

    def read(self) -> None:
        """Read weights, tokenizer and stop ids now."""
        assert self.judge is not None

    @cached_property
    def words(self) -> Words:
        return self._words()

    def encode(self, messages: Sequence[Message], settings: Settings) -> list[int]:
        """Return the chat's token ids, rendered and tokenised by transformers itself with the template in the files."""
        tokenizer = self.words.tokenizer
        if tokenizer.chat_template is None:
            ids: list[int] = tokenizer("\n".join(message.content for message in messages))["input_ids"]
            return ids
        chat, tools = template_input(messages)
        rendered = tokenizer.apply_chat_template(
            chat,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            enable_thinking=bool(settings.thinking),
            **({"tools": tools} if tools else {}),
        )
        return list(rendered["input_ids"])

    def audit(
        self, messages: Sequence[Message], settings: Settings, prompt: Sequence[int], answer: Sequence[int]
    ) -> Divergence | None:
        """Run `Judge.audit`; `prompt`, the engine's own for these messages, must equal the judge's."""
        if (own := self._own(messages, settings, prompt)) is None:
            return Divergence(0)
        return self.judge.audit(own, answer, settings.repetition_penalty)

    def divergence(
        self,
        messages: Sequence[Message],
        settings: Settings,
        prompt: Sequence[int],
        plain: Sequence[int],
        other: Sequence[int],
    ) -> Divergence:
        """Run `Judge.divergence`; `prompt` as in `audit`."""
        if (own := self._own(messages, settings, prompt)) is None:
            return Divergence(0)
        return self.judge.divergence(own, plain, other, settings.repetition_penalty)

    def _own(self, messages: Sequence[Message], settings: Settings, prompt: Sequence[int]) -> list[int] | None:
        """Return the judge's own prompt, or None if the engine's differs."""
        own = list(prompt) if self.words.tokenizer is None else self.encode(messages, settings)
        if own == list(prompt):
            return own
        self.objections[OTHER_PROMPT] = self.objections.get(OTHER_PROMPT, 0) + 1
        return None

    def changed(self) -> str | None:
        """Return the name of a shared weight that has changed, or None."""
        if self._shared is None:
            return None
        now = checksums(self._shared)
        return next((name for name, was in self._sums.items() if now[name] != was), None)

    def require_unchanged(self) -> None:
        """Raise UserError if laying out the engine's network changed the weights that the judge reads."""
        if name := self.changed():
            raise UserError(
                f"{name} was changed when the engine laid out its weights, which the judge shares; this is a bug: "
                "report it, and use --engine transformers"
            )


def judge_of_model(model: Any, stop_ids: Callable[[], frozenset[int]], max_new_tokens: int) -> ChatJudge:
    """Return the judge of a model that was not loaded from files: the model itself, for lack of anything else."""
    own = _bare(twin(model))
    return ChatJudge(lambda: own, lambda: Words(None, stop_ids()), max_new_tokens, own)


def chat_judge_of(
    models: Models, max_new_tokens: int, stop_ids: Callable[[], frozenset[int]], other_bytes: int = 0
) -> ChatJudge:
    """Return the judge of these models; call it before anything is laid out or hooked.

    `other_bytes` of memory will be needed beside the weights. Models that were not loaded from files are judged by
    themselves, and end answers at `stop_ids`.
    """
    source = models.source
    if source is None:
        return judge_of_model(models.target, stop_ids, max_new_tokens)
    if has_room(models, source, other_bytes):
        return ChatJudge(lambda: weights_in(source), lambda: words_in(source), max_new_tokens)
    if has_room_for_layers(models, source, other_bytes) and (streamed := streamed_from(source, models.target)):
        return ChatJudge(lambda: streamed, lambda: words_in(source), max_new_tokens, weights=STREAMED_WEIGHTS)
    own = _bare(twin(models.target))
    return ChatJudge(lambda: own, lambda: words_in(source), max_new_tokens, own)


def has_room(models: Models, source: Source, other_bytes: int) -> bool:
    """Return True if the target's weights fit a second time, beside everything else that the run needs."""
    dtype, how = models.target.dtype, source.placement
    target = memory.footprint_of(source.folder, dtype, how.trust_remote_code, how.quantize)
    if target.weights_bytes <= ALWAYS:
        return True
    if source.free_bytes is None:
        return False
    return _fits(models, source, target, target.weights_bytes + target.loading_bytes + other_bytes)


def has_room_for_layers(models: Models, source: Source, other_bytes: int) -> bool:
    """Return True if one layer at a time fits into memory, with the embedding and all else outside the layers.

    True if the free memory is unknown: this is a small part of the weights loaded already.
    """
    dtype, how = models.target.dtype, source.placement
    if how.spread or how.quantize is not None:
        return False
    if source.free_bytes is None:
        return True
    target = memory.footprint_of(source.folder, dtype, how.trust_remote_code)
    layers = [_bytes_of(layer) for layer in _layers(models.target).values()]
    outside = _bytes_of(models.target) - sum(layers)
    return _fits(models, source, target, outside + max(layers, default=0) + other_bytes)


def _fits(models: Models, source: Source, target: memory.Footprint, more_bytes: int) -> bool:
    """Return True if `more_bytes` fit beside target and drafts."""
    assert source.free_bytes is not None
    drafts = sum(map(_bytes_of, models.drafts.values()))
    left = source.free_bytes - target.weights_bytes - drafts - more_bytes
    return left >= source.free_bytes // MARGIN


def _bytes_of(model: nn.Module) -> int:
    return memory.bytes_of(model.parameters())


def _layers(model: Any) -> dict[str, nn.Module]:
    """Return the decoder layers, the modules that transformers never splits, by name."""
    kinds = {*(model._no_split_modules or ())}
    return {name: module for name, module in model.named_modules() if type(module).__name__ in kinds}


def _bare(model: nn.Module) -> nn.Module:
    """Return the model with its hooks removed."""
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return model.eval()


def weights_in(source: Source) -> Any:
    """Return a module of the publisher's class with the files' weights. Raises UserError if they cannot be read."""
    how = source.placement
    try:
        if how.parallel > 1:
            options = parallel.options_of(config_of(source.folder, how.trust_remote_code), how.parallel)
            return parallel.make_whole(_read(source, options)).eval()
        model = _read(source, {"device_map": "auto"} if how.spread else {})
        if how.quantize is not None:
            model = quantization.quantize(model, how.quantize, source.device)
        elif not how.spread:
            model = model.to(source.device)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{source.folder} does not fit on {source.device} a second time, which the judge needs"
        ) from error
    except UNREADABLE as error:
        raise cannot_load(source.folder, error) from error
    return model.eval()


def streamed_from(source: Source, loaded: nn.Module) -> Any | None:
    """Return the module of `weights_in`, but with layers read when a forward pass reaches them, and then dropped.

    Returns None if the modules cannot read the files directly (pickles, or experts stored one by one): transformers
    would have to write a second copy of the weights to disk. `loaded` is another model of the same class.
    """
    layers = _layers(loaded)
    homes = dict.fromkeys(layers, "disk") | dict.fromkeys(_outside(loaded, layers), source.device)
    try:
        return _read(source, {"device_map": homes}).eval()
    except UNREADABLE:
        # They were read a moment ago, so nothing else can be wrong with them.
        return None


def _read(source: Source, options: Mapping[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    how = source.placement
    return AutoModelForCausalLM.from_pretrained(
        source.folder,
        dtype=source.dtype,
        attn_implementation=how.attention,
        trust_remote_code=how.trust_remote_code,
        **options,
    )


def _outside(module: nn.Module, layers: Mapping[str, nn.Module], prefix: str = "") -> Iterator[str]:
    """Yield the names of the largest modules that contain no layer."""
    for name, child in module.named_children():
        if any(layer.startswith(f"{prefix}{name}.") for layer in layers):
            yield from _outside(child, layers, f"{prefix}{name}.")
        elif f"{prefix}{name}" not in layers:
            yield f"{prefix}{name}"


def words_in(source: Source) -> Words:
    """Return tokenizer and stop ids of the files. Raises UserError if they cannot be read."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=source.placement.trust_remote_code)
    except UNREADABLE as error:
        raise cannot_load(source.folder, error) from error
    tokenizer = with_template(tokenizer, source.folder, source.placement.date)
    stop = configured_stop(source.folder)
    listed = [*(stop if isinstance(stop, list) else [stop]), tokenizer.eos_token_id]
    return Words(tokenizer, frozenset(stop_id for stop_id in listed if stop_id is not None))


def configured_stop(folder: Path) -> int | list[int] | None:
    """Return the stop ids in the files, other than the tokenizer's."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            config: Mapping[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
            stop: int | list[int] | None = config.get("eos_token_id")
            return stop
    return None


def checksums(model: nn.Module) -> dict[str, bytes]:
    """Return a checksum of each parameter and buffer by name, over its values in row order, however stored."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: _checksum(tensor) for name, tensor in named}


@torch.no_grad()
def _checksum(tensor: Tensor) -> bytes:
    """Hash the row and column sums of a tensor's bytes as a matrix: column sums alone would miss reordered rows."""
    total = hashlib.blake2b(digest_size=16)
    for part in _plain(tensor):
        flat = part.detach().contiguous().flatten()
        # Bytes can be viewed as 64-bit numbers only from an aligned offset.
        flat = (flat.clone() if flat.storage_offset() * flat.itemsize % 8 else flat).view(torch.uint8)
        whole = len(flat) // (8 * BLOCK) * 8 * BLOCK
        block = flat[:whole].view(torch.int64).view(-1, BLOCK)
        for piece in (block.sum(dim=0), block.sum(dim=1), flat[whole:]):
            total.update(piece.cpu().numpy().tobytes())
    return total.digest()


def _plain(tensor: Any) -> Iterator[Tensor]:
    """Yield the plain tensors that a weight consists of: a quantised weight has scales, too."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
        return
    yield tensor.data
    scales = getattr(getattr(tensor, "quant_state", None), "absmax", None)
    if scales is not None:
        yield scales
