"""What a judge needs of a target, read by itself: weights, tokenizer, template and stop ids, straight from the files.

Whatever loads, lays out and computes the engine's target may be what is wrong, so the judge shares none of it: it has
modules of its own, on which nothing of ours was ever hooked. Its weights are read anew: at once where memory allows,
else layer by layer in each of its passes. Where neither is possible, it reads those that the engine's forward pass
reads, and checksums taken before they were laid out, afterwards and at the end say whether they are still those that
were loaded.
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
from dflash_bench.core.types import OWN_WEIGHTS, SHARED_WEIGHTS, STREAMED_WEIGHTS, Divergence, Message, Settings
from dflash_bench.engine.judge import Judge
from dflash_bench.models import memory, quantization
from dflash_bench.models.hub import UNREADABLE, cannot_load
from dflash_bench.models.loading import Models, Source
from dflash_bench.models.weights import may_be_held_twice, twin

OTHER_PROMPT = "the prompt is not what the template and tokenizer in the target's files make of the messages"
ALWAYS = 1 << 30
"""Bytes of weights that are always read twice."""
MARGIN = 8
"""One part in so many of the free memory is left for what passes through the layers."""
BLOCK = 1024
"""Columns of the matrix that a checksum takes the bytes of a tensor for."""


@dataclass(frozen=True, slots=True)
class Words:
    """`tokenizer` is None where there are no files to read one from: then prompts are taken as they are."""

    tokenizer: Any
    stop_ids: frozenset[int]
    """Every id that ends an answer."""


class Witness:
    """Judges answers to chats. `weights` says which it reads: OWN_WEIGHTS, STREAMED_WEIGHTS or SHARED_WEIGHTS."""

    def __init__(
        self,
        model: Callable[[], Any],
        words: Callable[[], Words],
        max_new_tokens: int,
        shared: nn.Module | None = None,
        weights: str = OWN_WEIGHTS,
    ) -> None:
        """Model and words are read when they are first needed; `shared` is the model whose weights others read, too."""
        self.max_new_tokens, self.weights = max_new_tokens, weights if shared is None else SHARED_WEIGHTS
        self.objections: dict[str, int] = {}
        """What was wrong beyond tokens, and in how many questions to the judge."""
        self._model, self._words, self._shared = model, words, shared
        self._sums = {} if shared is None else checksums(shared)

    @cached_property
    def judge(self) -> Judge:
        """Of answers to prompts of token ids. Raises UserError where its weights cannot be read."""
        return Judge(self._model(), self.words.stop_ids, self.max_new_tokens)

    def read(self) -> None:
        """All that it needs, now."""
        assert self.judge is not None

    @cached_property
    def words(self) -> Words:
        return self._words()

    def encode(self, messages: Sequence[Message], settings: Settings) -> list[int]:
        """The chat as transformers itself renders and tokenises it, by the template in the files."""
        tokenizer = self.words.tokenizer
        if tokenizer.chat_template is None:
            ids: list[int] = tokenizer("\n".join(message.content for message in messages))["input_ids"]
            return ids
        chat = [{"role": message.role, "content": message.content} for message in messages]
        rendered = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True, enable_thinking=bool(settings.thinking)
        )
        return list(rendered["input_ids"])

    def audit(
        self, messages: Sequence[Message], settings: Settings, prompt: Sequence[int], answer: Sequence[int]
    ) -> Divergence | None:
        """As `Judge.audit`; `prompt` is what the engine makes of the messages, and must be the judge's own, too."""
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
        """As `Judge.divergence`; `prompt` as for `audit`."""
        if (own := self._own(messages, settings, prompt)) is None:
            return Divergence(0)
        return self.judge.divergence(own, plain, other, settings.repetition_penalty)

    def _own(self, messages: Sequence[Message], settings: Settings, prompt: Sequence[int]) -> list[int] | None:
        """The judge's own prompt; None where the engine's is another."""
        own = list(prompt) if self.words.tokenizer is None else self.encode(messages, settings)
        if own == list(prompt):
            return own
        self.objections[OTHER_PROMPT] = self.objections.get(OTHER_PROMPT, 0) + 1
        return None

    def changed(self) -> str | None:
        """A shared weight that is no longer what it was; None where all are, and where nothing is shared."""
        if self._shared is None:
            return None
        now = checksums(self._shared)
        return next((name for name, was in self._sums.items() if now[name] != was), None)

    def require_unchanged(self) -> None:
        """Raises UserError where laying out the engine's network changed what the judge reads."""
        if name := self.changed():
            raise UserError(
                f"{name} was changed when the engine laid out its weights, which the judge shares; this is a bug: "
                "report it, and use --engine transformers"
            )


def given(model: Any, stop_ids: Callable[[], frozenset[int]], max_new_tokens: int) -> Witness:
    """Of a model that was not loaded from files: it is asked itself, and nothing is known beside what is given."""
    own = _bare(twin(model))
    return Witness(lambda: own, lambda: Words(None, stop_ids()), max_new_tokens, own)


def witness_of(
    models: Models, max_new_tokens: int, stop_ids: Callable[[], frozenset[int]], other_bytes: int = 0
) -> Witness:
    """To be called before anything is laid out or hooked. `other_bytes` will be needed beside the weights.

    Models that were not loaded from files are judged by themselves, and end answers at `stop_ids`.
    """
    source = models.source
    if source is None:
        return given(models.target, stop_ids, max_new_tokens)
    if has_room(models, source, other_bytes):
        return Witness(lambda: weights_in(source), lambda: words_in(source), max_new_tokens)
    if has_room_for_layers(models, source, other_bytes) and (streamed := streamed_from(source, models.target)):
        return Witness(lambda: streamed, lambda: words_in(source), max_new_tokens, weights=STREAMED_WEIGHTS)
    own = _bare(twin(models.target))
    return Witness(lambda: own, lambda: words_in(source), max_new_tokens, own)


def has_room(models: Models, source: Source, other_bytes: int) -> bool:
    """Is there memory for the target's weights a second time, beside all else that the run needs?"""
    dtype, how = models.target.dtype, source.placement
    target = memory.footprint_of(source.folder, dtype, how.trust_remote_code, how.quantize)
    if target.weights_bytes <= ALWAYS:
        return True
    if source.free_bytes is None:
        return False
    return _fits(models, source, target, target.weights_bytes + target.loading_bytes + other_bytes)


def has_room_for_layers(models: Models, source: Source, other_bytes: int) -> bool:
    """Is there memory for one layer at a time, with the embedding and all else that is in no layer?

    Where it is not known how much is free, there is: that is a small part of what was loaded already.
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
    """Beside target, drafts and a second layout of the target's weights, if it will be made?"""
    assert source.free_bytes is not None
    drafts = sum(map(_bytes_of, models.drafts.values()))
    left = source.free_bytes - target.weights_bytes - drafts - more_bytes
    if may_be_held_twice(target.layout_bytes, source.free_bytes - target.weights_bytes - drafts):
        left -= target.layout_bytes
    return left >= source.free_bytes // MARGIN


def _bytes_of(model: nn.Module) -> int:
    return sum(weight.nbytes for weight in model.parameters())


def _layers(model: Any) -> dict[str, nn.Module]:
    """By name what transformers never divides: the decoder layers."""
    kinds = {*(model._no_split_modules or ())}
    return {name: module for name, module in model.named_modules() if type(module).__name__ in kinds}


def _bare(model: nn.Module) -> nn.Module:
    """Without hooks that came with it."""
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return model.eval()


def weights_in(source: Source) -> Any:
    """A module of the publisher's class with the weights in the files. Raises UserError where they cannot be read."""
    from transformers import AutoModelForCausalLM

    how = source.placement
    options: dict[str, Any] = {"device_map": "auto"} if how.spread else {}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.folder, dtype=source.dtype, attn_implementation=how.attention,
            trust_remote_code=how.trust_remote_code, **options,
        )  # fmt: skip
        if how.quantize is not None:
            model = quantization.quantized(model, how.quantize, source.device)
        elif not how.spread:
            model = model.to(source.device)
    except torch.OutOfMemoryError as error:
        raise UserError(f"{source.folder} does not fit on {source.device} again, for the judge") from error
    except UNREADABLE as error:
        raise cannot_load(source.folder, error) from error
    return model.eval()


def streamed_from(source: Source, loaded: nn.Module) -> Any | None:
    """As `weights_in`, but each layer is read from the files when a pass comes to it, and forgotten behind it.

    None where the files are not what the modules read (pickles, or experts that are stored one by one): then a second
    copy of the weights would have to be written to the disk. `loaded` is another model of the same class.
    """
    from transformers import AutoModelForCausalLM

    layers = _layers(loaded)
    homes = dict.fromkeys(layers, "disk") | dict.fromkeys(_outside(loaded, layers), source.device)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.folder, dtype=source.dtype, attn_implementation=source.placement.attention,
            trust_remote_code=source.placement.trust_remote_code, device_map=homes,
        )  # fmt: skip
    except UNREADABLE:
        # They were read a moment ago, so that nothing else can be wrong with them.
        return None
    return model.eval()


def _outside(module: nn.Module, layers: Mapping[str, nn.Module], prefix: str = "") -> Iterator[str]:
    """The names of the largest modules without a layer in them."""
    for name, child in module.named_children():
        if any(layer.startswith(f"{prefix}{name}.") for layer in layers):
            yield from _outside(child, layers, f"{prefix}{name}.")
        elif f"{prefix}{name}" not in layers:
            yield f"{prefix}{name}"


def words_in(source: Source) -> Words:
    """Raises UserError for a tokenizer that cannot be read."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=source.placement.trust_remote_code)
    except UNREADABLE as error:
        raise cannot_load(source.folder, error) from error
    stop = configured_stop(source.folder)
    listed = [*(stop if isinstance(stop, list) else [stop]), tokenizer.eos_token_id]
    return Words(tokenizer, frozenset(one for one in listed if one is not None))


def configured_stop(folder: Path) -> int | list[int] | None:
    """What the files say ends an answer, beside the tokenizer's own."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            said: Mapping[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
            stop: int | list[int] | None = said.get("eos_token_id")
            return stop
    return None


def checksums(model: nn.Module) -> dict[str, bytes]:
    """Of each parameter and buffer, by its name; of its values in the order of rows, however they are stored."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: _checksum(tensor) for name, tensor in named}


@torch.no_grad()
def _checksum(tensor: Tensor) -> bytes:
    """Of a matrix of its bytes the sums of rows and of columns: rows in another order have the same columns."""
    total = hashlib.blake2b(digest_size=16)
    for part in _plain(tensor):
        flat = part.detach().contiguous().flatten()
        # Bytes can be viewed as longer numbers only from such a place on.
        flat = (flat.clone() if flat.storage_offset() * flat.itemsize % 8 else flat).view(torch.uint8)
        whole = len(flat) // (8 * BLOCK) * 8 * BLOCK
        block = flat[:whole].view(torch.int64).view(-1, BLOCK)
        for piece in (block.sum(dim=0), block.sum(dim=1), flat[whole:]):
            total.update(piece.cpu().numpy().tobytes())
    return total.digest()


def _plain(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that a weight is made of: a quantised one has scales, too."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
        return
    yield tensor.data
    scales = getattr(getattr(tensor, "quant_state", None), "absmax", None)
    if scales is not None:
        yield scales
