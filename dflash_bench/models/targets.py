"""Targets: finding them, checking drafts against them, and loading them as language models."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_bench.core import files
from dflash_bench.core.errors import ANOTHER_DRAFT, DraftProblem, UserError
from dflash_bench.models import block_models, gguf, hub, parallel, presets, quantization, weights
from dflash_bench.models.configs import layer_configs, optional, varying
from dflash_bench.models.formats.base import EMBEDDING, HEAD, TargetShape
from dflash_bench.models.hub import UNREADABLE, cannot_load, is_unreadable, read_config
from dflash_bench.models.nets.mtp import heads_among

# Whether a draft was made for a target: evidence from the draft's tokenizer, and the target that its config names.


def other_tokenizer(folder: Path, vocabulary: Mapping[str, int]) -> DraftProblem | None:
    """Return a problem if the draft's tokenizer uses an id of the target's `vocabulary` for another token.

    A draft without a tokenizer uses the target's. Tokens that only one of the two has are harmless: drafts were
    published with a mask token added, and targets are fine-tuned with a few more.
    """
    draft_vocabulary = vocabulary_in(folder)
    tokens = {index: token for token, index in vocabulary.items()}
    differing = {index: token for token, index in draft_vocabulary.items() if tokens.get(index, token) != token}
    if not differing:
        return None
    first = min(differing)
    return DraftProblem(
        "other_tokenizer",
        f"made for another tokenizer: {len(differing)} of {len(draft_vocabulary)} ids differ; {first} is "
        f"{differing[first]!r} in the draft and {tokens[first]!r} in the target",
        ANOTHER_DRAFT,
    )


def with_tokens(shape: TargetShape, vocabulary: Mapping[str, int], draft: Path) -> TargetShape:
    """Return a target's shape with the number of tokens in its `vocabulary`, and in the draft's, if it has one."""
    sizes = [max(one.values()) + 1 for one in (vocabulary, vocabulary_in(draft)) if one]
    return replace(shape, num_tokens=min(sizes)) if vocabulary else shape


def vocabulary_in(folder: Path) -> dict[str, int]:
    """Return token -> id from tokenizer.json or else vocab.json, or {}. Raises UserError for a damaged file."""
    for name in ("tokenizer.json", "vocab.json"):
        path = folder / name
        if not os.path.lexists(path):
            continue
        content = files.json_of(path)
        try:
            return _tokens(content) if name == "tokenizer.json" else {str(t): int(i) for t, i in content.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a vocabulary ({error})", "copy it again, or remove it") from error
    return {}


def _tokens(content: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of a tokenizer's model, which maps tokens to ids, or lists [token, score] if it is unigram."""
    vocab = content["model"]["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((token, i) for i, (token, _) in enumerate(vocab))
    added = ((token["content"], token["id"]) for token in content.get("added_tokens") or ())
    return {str(token): int(index) for token, index in (*pairs, *added)}


def other_verifier(config: Mapping[str, Any], target: str) -> str | None:
    """Return a note if the draft's config names another target, which is no proof: a folder may have any name."""
    trained_for = verifier(config)
    if trained_for is None or trained_for.rpartition("/")[2].lower() == target.rpartition("/")[2].lower():
        return None
    return f"its config names {trained_for} as its target, but this one is {target}"


def verifier(config: Mapping[str, Any]) -> str | None:
    """Return the target named in a speculators config, or None."""
    match config.get("speculators_config"):
        case {"verifier": {"name_or_path": str(name)}} if name:
            return name
    return None


# Properties of a target that drafts depend on, read from its folder without loading the model.


SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
IF_GIVEN = tuple(
    """
    max_position_embeddings head_dim intermediate_size num_key_value_heads num_experts num_experts_per_tok
    num_local_experts moe_intermediate_size linear_num_key_heads linear_num_value_heads linear_key_head_dim
    linear_value_head_dim linear_conv_kernel_dim
    """.split()
)
"""Sizes that only some kinds of targets have; numbers of experts may be 0."""
SEVERAL_STREAMS = ("gemma3n_text",)
LARGEST = 1 << 24
"""The largest plausible size: a damaged number must not make us allocate huge memory."""
LEAST_POSITIONS = 32
"""The shortest usable context: a run times passes of sixteen tokens, and no chat fits into fewer."""


def find_draft(reference: str) -> Path:
    """Return the folder of a draft: a folder unchanged, a hub id's snapshot, or MODEL/DRAFT of a model known by name.

    Raises UserError.
    """
    name, _, draft = reference.partition("/")
    drafts = presets.table()[name].drafts if name in presets.table() else {}
    if drafts and not draft:
        # The package's location on disk is not informative; a hub id is.
        named = [f"{name}/{key}" if Path(own).is_absolute() else own for key, own in drafts.items()]
        raise UserError(f"{name} is a model and not a draft; its drafts are {', '.join(named)}")
    reference = drafts.get(draft, reference)
    return hub.folder_of(reference) or hub.fetch(reference, pickles=True).folder


def find_target(name: str) -> Path:
    """Return the folder of a target, given a folder, a GGUF file, a hub id or a model's name. Raises UserError."""
    if gguf.is_file(name):
        return gguf.converted_folder(Path(name))
    folder = hub.folder_of(name)
    if folder and os.path.lexists(folder / "config.json"):
        return folder
    if "/" in name and folder is None:
        return hub.fetch(name).folder
    chosen = presets.preset(name)
    presets.require_fetched(name, chosen)
    return hub.fetch(chosen.target).folder


def name_of(name: str) -> str:
    """Return the name of the target that `find_target` finds for `name`."""
    return presets.name(presets.table()[name].target if name in presets.table() else name)


def tokenizer_of(folder: Path, trust_remote_code: bool = False, date: str | None = None) -> Any:
    """Load the tokenizer, with the template's clock set to `date`.

    Raises UserError if it is damaged or missing, where transformers would invent one.
    """
    there = sorted(folder.iterdir()) if folder.is_dir() else []
    about = ((path, path.stat() if path.exists() else path.lstat()) for path in there)
    stamps = tuple((path, one.st_size, one.st_mtime_ns) for path, one in about)
    # Reading 150,000 tokens takes seconds, and a run asks for them three times. A copy, as its template may be set.
    return with_template(copy.copy(_read_tokenizer(folder, trust_remote_code, stamps)), folder, date)


@lru_cache(maxsize=2)
def _read_tokenizer(folder: Path, trust_remote_code: bool, _stamps: tuple[object, ...]) -> Any:
    """Load a tokenizer, once as long as the files in its folder stay the same."""
    from transformers import AutoTokenizer

    vocabulary_in(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        known = {*tokenizer.encode("a", add_special_tokens=False)} - {tokenizer.unk_token_id}
    except BaseException as error:
        if not is_unreadable(error):
            raise
        raise cannot_load(folder, error) from error
    if not known:
        raise UserError(f"{folder} has no tokenizer that reads text; copy its tokenizer files from where it came from")
    return tokenizer


def with_template(tokenizer: Any, folder: Path, date: str | None) -> Any:
    """Return a tokenizer with the chat template of the files, for which it is always midnight of `date`.

    A template that asks for the time would otherwise render different prompts for engine, judge and later runs.
    """
    path = folder / "chat_template.json"
    if tokenizer.chat_template is None and os.path.lexists(path):  # which transformers leaves to processors
        content = files.json_of(path)
        template = content.get("chat_template") if isinstance(content, dict) else None
        if not isinstance(template, str):
            raise UserError(f"{path} holds no chat_template; copy it again, or remove it")
        tokenizer.chat_template = template
    match tokenizer.chat_template:
        case str(template) if date is not None:
            tokenizer.chat_template = _dated(template, date)
        case dict(templates) if date is not None:
            tokenizer.chat_template = {name: _dated(template, date) for name, template in templates.items()}
    return tokenizer


def _dated(template: str, date: str) -> str:
    """Return a template with a macro in place of transformers' clock: template values must be data, not functions."""
    if "strftime_now" not in template:
        return template
    moment = datetime.fromisoformat(date)
    directives = [f"%{flag}{letter}" for flag in ("-", "") for letter in "aAbBcCdDeFgGhHIjmMnpPrRSTuUVwWxXyY"]
    written = "".join(f"|replace({one!r}, {moment.strftime(one)!r})" for one in directives)
    return f"{{% macro strftime_now(form) %}}{{{{ form{written} }}}}{{% endmacro %}}\n{template}"


def config_of(folder: Path, trust_remote_code: bool = False) -> Any:
    """Return the config of the target's text model. Raises UserError if there is none."""
    from transformers import AutoConfig

    read_config(folder)
    try:
        usual = block_models.usual_config(read_config(folder))
        if usual is None:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()
        else:
            config = AutoConfig.for_model(**usual)
        if several := [name for name in SIZES if name in varying(config)]:
            raise UserError(f"a {config.model_type} target whose {several[0]} differs by layer is not supported")
        if not hasattr(config, "num_attention_heads") or config.model_type in SEVERAL_STREAMS:
            why = (
                "its layers pass on several streams, and a draft reads one"
                if config.model_type in SEVERAL_STREAMS
                else "it has no attention, but a state that cannot be rolled back"
            )
            raise UserError(f"a {config.model_type} target ({folder}) is not supported: {why}", "use another target")
        sizes = {name: getattr(config, name) for name in SIZES}
        optional(config, "kv_sharing_modes")  # raises if no earlier layer has what the last layers reuse
    except UNREADABLE as error:
        raise cannot_load(folder, error) from error
    _check_sizes(folder, config, sizes)
    if varying(config):
        for layer in layer_configs(config):
            _check_sizes(folder, layer, sizes)
    _check_layers(folder, config)
    return config


def _check_sizes(folder: Path, config: Any, sizes: dict[str, Any]) -> None:
    """Raise UserError for an impossible size, which would later end in a traceback or huge memory use."""
    sizes = sizes | {name: size for name in IF_GIVEN if (size := optional(config, name)) is not None}
    for name, size in sizes.items():
        least = 0 if "experts" in name else 1
        if type(size) is not int or not least <= size <= LARGEST:
            raise UserError(f"{folder} is not a target: {name} in its config.json cannot be {size!r}")
    if sizes.get("max_position_embeddings", LEAST_POSITIONS) < LEAST_POSITIONS:
        raise UserError(
            f"{folder}: max_position_embeddings in its config.json is {sizes['max_position_embeddings']}, and no chat "
            f"fits in fewer than {LEAST_POSITIONS}; copy config.json again"
        )
    heads, kv_heads = sizes["num_attention_heads"], sizes.get("num_key_value_heads")
    if kv_heads is not None and heads % kv_heads:
        raise UserError(f"{folder}: {heads} heads on {kv_heads} key-value heads in its config.json do not add up")


def _check_layers(folder: Path, config: Any) -> None:
    types = optional(config, "layer_types")
    if types is None:
        return
    if len(types) != config.num_hidden_layers:
        raise UserError(
            f"{folder}: layer_types in its config.json names {len(types)} layers, and num_hidden_layers is "
            f"{config.num_hidden_layers}"
        )
    window = optional(config, "sliding_window")
    if "sliding_attention" in types and (type(window) is not int or window < 1):
        raise UserError(
            f"{folder}: layer_types in its config.json names sliding layers, and sliding_window cannot be {window!r}; "
            "copy config.json again"
        )


def shape_of(folder: Path) -> TargetShape:
    """Return the target's shape; the vocabulary is the embedding's rows, if known, which may exceed the config's."""
    config = config_of(folder)
    stored = stored_tables(folder, headers_only=True)
    rows = stored[EMBEDDING].shape[0] if EMBEDDING in stored else config.vocab_size
    return TargetShape(config.hidden_size, rows, config.num_hidden_layers)


def vocabulary_of(folder: Path) -> dict[str, Tensor]:
    """Return the target's embedding and head [V, H]; if they are tied, the head is a copy. Raises UserError."""
    stored = stored_tables(folder)
    if EMBEDDING not in stored:
        raise UserError(f"{folder} holds no tensor named {EMBEDDING}; is it a target?")
    return {EMBEDDING: stored[EMBEDDING], HEAD: stored[HEAD] if HEAD in stored else stored[EMBEDDING].clone()}


def stored_tables(folder: Path, headers_only: bool = False) -> dict[str, Tensor]:
    """Return embedding and head by their plain names; multi-part models prefix them.

    Tables of a layer, as DeepSeek stores them with its MTP heads, are not the target's.
    """
    if headers_only and not any(folder.glob("*.safetensors")):
        return {}
    wanted = (EMBEDDING, HEAD)

    def is_table(name: str) -> bool:
        return name.endswith(wanted) and "layers." not in name

    tensors = weights.read_tensors(folder, lambda name: not headers_only and is_table(name))
    return {
        plain: tensor for plain in wanted for name, tensor in tensors.items() if name.endswith(plain) and is_table(name)
    }


# Loading a causal language model (target or draft) by transformers; incompletely loaded models are refused.


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Options of loading a target, besides its device and dtype."""

    spread: bool = False
    """Distribute its layers over all GPUs, instead of one device."""
    attention: str | None = None
    """The attention implementation; None for the architecture's default in transformers."""
    trust_remote_code: bool = False
    quantize: str | None = None
    """A key of `quantization.PACKAGES`."""
    date: str | None = None
    """The date in the chat template, as YYYY-MM-DD; None: the current date."""
    parallel: int = 1
    """The number of tensor parallel processes (`parallel.py`)."""


PLAIN = Placement()


def check(folder: Path, placement: Placement = PLAIN) -> Any:
    """Return the model's config. Raises UserError if the model cannot be loaded, before anything large is read."""
    _check_code(folder, placement.trust_remote_code)
    config = config_of(folder, placement.trust_remote_code)
    if placement.spread:
        _require_accelerate()
    if placement.quantize is not None:
        _refuse_quantized(folder, placement.quantize)
    return config


def load(folder: Path, device: str, dtype: torch.dtype | str, placement: Placement = PLAIN) -> Any:
    """Load a model that `check` accepted. Raises UserError for missing or damaged weights, or too little memory."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"trust_remote_code": placement.trust_remote_code}
    if (alias := block_models.alias_of(read_config(folder))) is not None:
        options |= {"config": config_of(folder), "key_mapping": dict(alias.tensors) or None}
    if placement.spread:
        options["device_map"] = "auto"
    if placement.parallel > 1:
        options |= parallel.options_of(config_of(folder, placement.trust_remote_code), placement.parallel)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=placement.attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    except SafetensorError as error:
        raise UserError(f"{folder}: weights are truncated or not safetensors ({error}); copy them again") from error
    except UNREADABLE as error:
        raise cannot_load(folder, error) from error
    # transformers would make up weights for these, with a warning.
    unfit = [*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]
    if unfit:
        raise UserError(f"{folder}: {min(unfit)} is missing or not as config.json says; copy the weights again")
    # These it would ignore, except those it knows to belong to other uses of the checkpoint; and MTP heads, which not
    # every architecture of transformers knows.
    depth = model.config.get_text_config().num_hidden_layers
    heads = heads_among(report["unexpected_keys"], depth).values()
    if surplus := [name for name in report["unexpected_keys"] if name not in heads]:
        raise UserError(
            f"{folder}: config.json has no place for {min(surplus)} ({len(surplus)} such tensors); "
            "config.json belongs to other weights, or these tensors must be removed"
        )
    _check_stops(folder, model.generation_config.eos_token_id)
    if placement.parallel > 1:
        return parallel.make_whole(model)
    return spread(folder, model) if placement.spread else _placed(folder, model, device, placement.quantize)


def _check_stops(folder: Path, stops: object) -> None:
    for stop in stops if isinstance(stops, list) else [stops]:
        if stop is not None and type(stop) is not int:
            raise UserError(f"{folder}: eos_token_id in generation_config.json cannot be {stop!r}; it is a token's id")


def _placed(folder: Path, model: Any, device: str, quantize: str | None) -> Any:
    try:
        return model.to(device) if quantize is None else quantization.quantize(model, quantize, device)
    except torch.OutOfMemoryError as error:
        raise UserError(f"{folder} does not fit on {device}; use --device-map auto, or a smaller --dtype") from error


def _check_code(folder: Path, trusted: bool) -> None:
    """Raise UserError for a config that cannot be read, or if code is trusted that does not exist."""
    read_config(folder)
    configs = (path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("*config.json"))
    if trusted and not any('"auto_map"' in config for config in configs):
        raise UserError(f"--trust-remote-code has no effect: {folder} brings no code")


def _refuse_quantized(folder: Path, wanted: str) -> None:
    if (stored := read_config(folder).get("quantization_config")) is not None:
        how = stored.get("quant_method", "in some way") if isinstance(stored, dict) else "in some way"
        raise UserError(f"{folder} is quantised already ({how}); leave out --quantize {wanted}")


def _require_accelerate() -> None:
    if find_spec("accelerate") is None:
        raise UserError("--device-map needs accelerate, which is not installed; run: pip install accelerate")


def spread(folder: Path, model: Any) -> Any:
    """Make the output head return its logits on the embedding's device. Raises UserError for layers outside the GPUs.

    Drafts are on the embedding's device, and use embedding and head as if both were there. Layers on CPU or disk would
    be timed over the bus.
    """
    # There is no map if one device holds the whole model.
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    if places & {"cpu", "disk"} and torch.cuda.is_available():
        raise UserError(
            f"{folder} does not fit on the GPUs here, and timings with weights in CPU memory would mean nothing"
        )
    home = model.get_input_embeddings().weight.device
    model.get_output_embeddings().register_forward_hook(lambda _module, _inputs, logits: logits.to(home))
    return model
