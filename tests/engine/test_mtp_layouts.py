"""MTP heads as DeepSeek, GLM and MiMo store them: read, drafting as transformers' own module, exact, or refused."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear

import dflash_bench as db
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import parse
from dflash_bench.engine import loop
from dflash_bench.engine.backend import LocalBackend
from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.mtp import ModulesDrafter, MTPDrafter
from dflash_bench.engine.rows import Limits
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models import mtp_heads, targets
from dflash_bench.models.formats import TargetShape
from dflash_bench.models.inspect import inspect, text
from dflash_bench.models.memory import demand_of
from dflash_bench.models.nets.mtp import MTPConfig, MTPDraft
from helpers.each import each
from helpers.tiny import NANO, TOKENIZER
from helpers.tiny_architectures import ALTERNATING, INDEXED, LATENT, ROUTED, SHAPE
from helpers.toy import Scripted, Watching, plain, run, sometimes_wrong

DEPTH, VOCABULARY = 4, 1024
BODY = {
    **{key: value for key, value in SHAPE.items() if key != "head_dim"},
    "vocab_size": VOCABULARY,
    "eos_token_id": 2,
    "max_position_embeddings": 512,
}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek-v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**LATENT, "first_k_dense_replace": 1}),
    "glm-4.5": (
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {**ROUTED, "head_dim": 8, "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 1},
    ),
    "glm-4.7-flash": ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", LATENT),
    "deepseek-v3.2": ("DeepseekV32ForCausalLM", "DeepseekV32Config", {**INDEXED, "index_n_heads": 16}),
    "glm-5": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", {**INDEXED, "index_n_heads": 16}),
    "mimo-v2": (
        "MiMoV2FlashForCausalLM",
        "MiMoV2FlashConfig",
        {
            **{key: value for key, value in ROUTED.items() if key != "n_shared_experts"},
            **ALTERNATING,
            "head_dim": 12,
            "v_head_dim": 6,
        },
    ),
}
BY_HAND = {"deepseek-v3.2": -1, "glm-5": -1, "mimo-v2": 0}
"""Kinds for whose heads transformers has no module, and the target's layer that is of the heads' class and parts."""
SHAPE_OF_TARGET = TargetShape(32, VOCABULARY, DEPTH)
THEIRS = {
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "eh_proj",
    "norm": "shared_head.norm",
}
MIMO_V2 = {**THEIRS, "norm": "final_layernorm", "layers.0.post_attention_layernorm": "pre_mlp_layernorm"}
MIMO = {
    "pre_fc_norm_embedding": "token_layernorm",
    "pre_fc_norm_hidden": "hidden_layernorm",
    "fc": "input_proj",
    "norm": "final_layernorm",
}
PROMPTS = [[5, 7], [3, 4, 5, 6, 7, 8, 9, 10, 11], list(range(2, 24))]


def filled(module: Any, seed: int) -> Any:
    """Random weights of which each matters, norms and corrections of scores too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.state_dict().items():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + ("norm" in name) * 0.7)
    return module.eval()


@cache
def model_of(kind: str) -> Any:
    model_class, config_class, changes = KINDS[kind]
    new: Callable[[Any], Any] = getattr(transformers, model_class)
    return filled(new(getattr(transformers, config_class)(**BODY | changes)), 0)


@cache
def heads_of(kind: str) -> MTPDraft:
    modules = {"is_dense": True, "num_layers": 3} if kind == "mimo-v2" else {}
    draft: MTPDraft = filled(MTPDraft(MTPConfig.of(model_of(kind).config, **modules)).to_empty(device="cpu"), 1)
    return draft


def modules_of(kind: str) -> list[Any]:
    return [heads_of(kind), *heads_of(kind).further]


def stored(draft: MTPDraft, prefix: str, names: dict[str, str]) -> dict[str, Tensor]:
    """The tensors as published: experts one by one, and the parts by these names."""
    found: dict[str, Tensor] = {}
    for name, tensor in draft.state_dict().items():
        part, _, kind = name.rpartition(".")
        if name.startswith("further."):
            continue
        if part in names:
            found[f"{prefix}{names[part]}.{kind}"] = tensor.clone()
        elif kind in ("gate_up_proj", "down_proj"):
            for number, one in enumerate(tensor):
                parts = {"gate": one.chunk(2)[0], "up": one.chunk(2)[1]} if kind == "gate_up_proj" else {"down": one}
                stem = f"{prefix}mlp.experts.{number}"
                found |= {f"{stem}.{which}_proj.weight": part.clone() for which, part in parts.items()}
        else:
            found[prefix + name.removeprefix("layers.0.")] = tensor.clone()
    return found


def checkpoint(kind: str, folder: Path) -> Path:
    """A target's checkpoint with heads behind its last layer, and copies of its embedding and head as published."""
    model = model_of(kind)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(NANO / "target" / name, folder / name)
    if kind == "mimo-v2":
        for number, module in enumerate(modules_of(kind)):
            found = stored(module, f"model.mtp.layers.{number}.", MIMO_V2)
            add(folder, {name.replace(".sinks", ".attention_sink_bias"): tensor for name, tensor in found.items()})
        return folder
    prefix = f"model.layers.{DEPTH}."
    tensors = stored(heads_of(kind), prefix, THEIRS)
    tensors[f"{prefix}embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
    tensors[f"{prefix}shared_head.head.weight"] = model.get_output_embeddings().weight.detach().clone()
    add(folder, tensors)
    return folder


def add(folder: Path, tensors: dict[str, Tensor]) -> None:
    held = load_file(folder / "model.safetensors")
    save_file(held | tensors, folder / "model.safetensors", metadata={"format": "pt"})


@each("kind", KINDS)
def test_heads_behind_the_last_layer_are_read_bit_for_bit(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(kind, tmp_path / "target")
    draft = mtp_heads.load(folder, SHAPE_OF_TARGET, torch.float32, "cpu")
    for name, tensor in heads_of(kind).state_dict().items():
        assert torch.equal(draft.state_dict()[name], tensor), name
    assert draft.has_experts == (kind != "mimo-v2") and draft.config.target_layer_ids == (DEPTH - 1,)
    target = targets.load(folder, "cpu", torch.float32)
    assert all(torch.equal(target.state_dict()[name], tensor) for name, tensor in model_of(kind).state_dict().items())


# The drafts, by the module that transformers has for such heads, which reads the same files.


class Published:
    """Drafts as transformers' own module does, without a cache that outlives a draft."""

    def __init__(self, folder: Path) -> None:
        layers, caches = transformers.modeling_layers, transformers.cache_utils
        if not hasattr(layers, "MtpModel"):
            pytest.skip("this release of transformers has no module for such heads")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        # Its patterns name the depths of the published models.
        self.model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{DEPTH}\..*"]
        self.model.config.num_mtp_layers = 1
        self.model.config.mtp_mlp_layer_types = ["sparse"]
        self.heads: Any = layers.MtpModel.from_pretrained(self.model).eval()
        self.new_cache = lambda: caches.MtpCache(config=self.model.config.get_mtp_config())

    @torch.inference_mode()
    def drafts(self, text: Sequence[int], num_drafts: int) -> tuple[list[int], Tensor]:
        """The tokens drafted behind a text, whose last token the target has not read, and their logits [N, V]."""
        hidden = self.model.get_decoder()(torch.tensor([list(text[:-1])])).last_hidden_state
        tokens, places = torch.tensor([list(text[1:])]), torch.arange(1, len(text))[None]
        cache, logits = self.new_cache(), []
        for _ in range(num_drafts):
            hidden = self.heads.forward_layer(0, hidden, places, cache, input_ids=tokens)[:, -1:]
            logits.append(self.heads._project_to_logits(hidden)[0, -1])
            tokens, places = logits[-1].argmax().view(1, 1), places[:, -1:] + 1
        return [int(one.argmax()) for one in logits], torch.stack(logits)


class ByHand:
    """Drafts with the class of the target's own layers, over whole texts and without a cache, as papers put it."""

    def __init__(self, kind: str) -> None:
        self.model, self.parts = model_of(kind), modules_of(kind)
        self.layers = [copy.deepcopy(self.model.model.layers[BY_HAND[kind]]) for _ in self.parts]
        for layer, parts in zip(self.layers, self.parts, strict=True):
            layer.load_state_dict(parts.layer.state_dict())
        self.window = ALTERNATING["sliding_window"] if kind == "mimo-v2" else None

    def through(self, number: int, pairs: Tensor) -> Tensor:
        """The output [1, T, H] of a module's layer and norm."""
        places = torch.arange(pairs.shape[1])
        back = places[:, None] - places
        hidden = (back < 0) | (back >= (self.window or len(places)))
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]
        by_kind = [] if self.window is None else ["sliding_attention"]
        angles = self.model.model.rotary_emb(pairs, places[None], *by_kind)
        out = self.layers[number](pairs, position_embeddings=angles, attention_mask=mask)
        return self.parts[number].norm(out[0] if isinstance(out, tuple) else out)

    def pair(self, number: int, tokens: Tensor, states: Tensor) -> Tensor:
        parts, embedded = self.parts[number], self.model.model.embed_tokens(tokens)
        normed = [parts.pre_fc_norm_embedding(embedded), parts.pre_fc_norm_hidden(states)]
        return linear(torch.cat(normed, dim=-1), parts.fc.weight)

    @torch.inference_mode()
    def drafts(self, text: Sequence[int], num_drafts: int) -> tuple[list[int], Tensor]:
        """Draft like `Published.drafts`; each of several modules reads the previous one's output, one token further."""
        states, tokens = self.model.model(torch.tensor([list(text[:-1])])).last_hidden_state, torch.tensor([text[1:]])
        pairs, logits = self.pair(0, tokens, states), []
        for number in range(num_drafts):
            out = self.through(number if len(self.parts) > 1 else 0, pairs)
            logits.append(self.model.lm_head(out[0, -1]))
            drafted = logits[-1].argmax().view(1, 1)
            if len(self.parts) == 1:
                pairs = torch.cat([pairs, self.pair(0, drafted, out[:, -1:])], dim=1)
            elif number + 1 < num_drafts:
                tokens = torch.cat([tokens[:, 1:], drafted], dim=1)
                pairs = self.pair(number + 1, tokens, out)
        return [int(one.argmax()) for one in logits], torch.stack(logits)


class Keeping(Watching):
    """Keeps what is drafted behind which text, and hands on what a scripted drafter makes of the right text."""

    def __init__(self, inner: MTPDrafter, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(inner)
        self.scripted = Scripted(texts, inner.num_drafts, sometimes_wrong(0.5, VOCABULARY))
        self.kept: list[tuple[list[list[int]], list[int], Tensor]] = []

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        self.scripted.observe(committed)
        self.texts, self.counts = [list(text) for text in committed.texts], list(committed.counts)

    def propose(self) -> Draft:
        draft = super().propose()
        assert draft is not None
        self.kept.append((self.texts, self.counts, draft.tokens.clone()))
        return self.scripted.propose()


@pytest.mark.parametrize("kind", KINDS)
def test_they_draft_what_transformers_own_modules_draft(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(kind, tmp_path / "target")
    published = ByHand(kind) if kind in BY_HAND else Published(folder)
    target, prompts = Target(targets.load(folder, "cpu", torch.float32)), PROMPTS[:3]
    draft = mtp_heads.load(folder, SHAPE_OF_TARGET, torch.float32, "cpu")
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, plain(target, prompts, 16), strict=True)]
    drafter = ModulesDrafter if draft.further else MTPDrafter
    watched = Keeping(drafter(draft, target.embedding, target.head, 3), texts)
    run(target, watched, prompts, 16)
    num_same = 0
    for written, counts, tokens in watched.kept:
        for row, (words, count) in enumerate(zip(written, counts, strict=True)):
            expected, logits = published.drafts(words, 3) if count else ([], torch.zeros(0))
            for drafted, best, scores in zip(tokens[row].tolist(), expected, logits, strict=False):
                if drafted != best:
                    assert scores[best] - scores[drafted] < 1e-3
                    break
                num_same += 1
    assert num_same > 60 and len({tuple(tokens[0].tolist()) for _, _, tokens in watched.kept}) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_they_draft_the_answer_is_the_plain_one(kind: str, tmp_path: Path) -> None:
    with db.Engine(target=checkpoint(kind, tmp_path / "target")) as engine:
        for prompt, method in zip(PROMPTS[:2], ("mtp", "mtp:1"), strict=True):
            expected = engine.generate(prompt, method="ar", max_new_tokens=20).token_ids
            answer = engine.generate(prompt, method=method, max_new_tokens=20)
            assert answer.token_ids == expected and answer.rounds


def test_modules_in_turn_draft_in_slots_and_behind_parts_of_prompts_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = Target(model_of("mimo-v2")), [*PROMPTS, [50], [*range(2, 40)]]

    def drafter() -> ModulesDrafter:
        return ModulesDrafter(heads_of("mimo-v2"), target.embedding, target.head, 3)

    alone = [run(target, drafter(), [prompt], 8) for prompt in prompts]
    assert [one.tokens[0] for one in alone] == plain(target, prompts, 8)
    for part, num_rows in ((256, 3), (5, 2)):
        monkeypatch.setattr(loop, "PART", part)
        backend = LocalBackend(target, None, {"mtp": drafter()}, Limits(8, frozenset()))
        backend.decode = lambda _ids: ""  # type: ignore[method-assign]
        for answer, one in zip(backend.generate_ids("mtp", prompts, num_rows=num_rows), alone, strict=True):
            assert list(answer.token_ids) == one.tokens[0]
            assert list(answer.drafted_ids or ()) == [token for step in one.rounds for token in step.drafted_ids[0]]


def test_more_tokens_than_modules_are_refused_with_the_most_that_can_be(tmp_path: Path) -> None:
    with (
        db.Engine(target=checkpoint("mimo-v2", tmp_path / "target")) as engine,
        pytest.raises(UserError, match="3 MTP modules draft at most 3 tokens per round; give --method mtp:3"),
    ):
        engine.generate(PROMPTS[0], method="mtp:4", max_new_tokens=4)


def test_modules_are_counted_one_by_one(tmp_path: Path) -> None:
    folder = checkpoint("mimo-v2", tmp_path / "target")
    demand = demand_of(folder, {"mtp": folder}, [parse("ar"), parse("mtp")], torch.float32)
    assert demand.target.weights_bytes == sum(weight.nbytes for weight in model_of("mimo-v2").state_dict().values())
    held = heads_of("mimo-v2").state_dict().values()
    assert demand.drafts["mtp"].weights_bytes == sum(weight.nbytes for weight in held)
    assert demand.drafts["mtp"].place_bytes == 3 * 4 * (12 + 6) * 4
    assert "tensors model.mtp.layers.0.*: --method mtp drafts with them" in text(inspect(str(folder)))


# MiMo's, which are Qwen2's layer and join the state before the embedding.


def test_heads_of_mimo_are_read_with_their_order_of_joining(tmp_path: Path) -> None:
    config = transformers.Qwen2Config(**BODY)
    draft: MTPDraft = filled(MTPDraft(MTPConfig.of(config)).to_empty(device="cpu"), 1)
    tensors = stored(draft, "model.mtp_layers.0.", MIMO)
    theirs = tensors["model.mtp_layers.0.input_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    raw = {
        **config.to_dict(),
        "model_type": "mimo",
        "num_nextn_predict_layers": 1,
        "architectures": ["MiMoForCausalLM"],
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    again = mtp_heads.load(tmp_path, SHAPE_OF_TARGET, torch.float32, "cpu")
    embedded, hidden = torch.randn(1, 3, 32), torch.randn(1, 3, 32)
    normed = [draft.pre_fc_norm_hidden(hidden), draft.pre_fc_norm_embedding(embedded)]
    assert torch.allclose(again.pair(embedded, hidden), linear(torch.cat(normed, dim=-1), theirs), atol=1e-5)
    assert inspect(str(tmp_path)).format == "MTP heads (qwen2)"
    with pytest.raises(UserError, match=r"missing tensor model\.mtp_layers\.0\.final_layernorm\.weight"):
        save_file({k: v for k, v in tensors.items() if "final" not in k}, tmp_path / "model.safetensors")
        mtp_heads.read(tmp_path)


# Kimi's, which are DeepSeek's behind a further prefix, in the checkpoint of a model that also sees.


def of_kimi(folder: Path) -> Path:
    """Heads apart from their target, under Kimi's names and config."""
    folder.mkdir()
    prefix = f"language_model.model.layers.{DEPTH}."
    save_file(stored(heads_of("deepseek-v3"), prefix, THEIRS), folder / "model.safetensors")
    config = transformers.Kimi_K25Config(text_config=model_of("deepseek-v3").config.to_dict()).to_dict()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_heads_behind_kimis_prefix_draft_as_deepseeks(tmp_path: Path) -> None:
    target, apart = checkpoint("deepseek-v3", tmp_path / "target"), of_kimi(tmp_path / "heads")
    draft = mtp_heads.load(apart, SHAPE_OF_TARGET, torch.float32, "cpu")
    assert all(torch.equal(draft.state_dict()[name], one) for name, one in heads_of("deepseek-v3").state_dict().items())
    answers = []
    for drafts in ({}, {"mtp": apart}):
        with db.Engine(target=target, drafts=drafts) as engine:
            answers.append(engine.generate(PROMPTS[1], method="mtp", max_new_tokens=20))
            assert answers[-1].token_ids == engine.generate(PROMPTS[1], method="ar", max_new_tokens=20).token_ids
    assert [step.drafted for step in answers[0].rounds] == [step.drafted for step in answers[1].rounds]


# Reports about heads, and refusals.


def test_a_target_whose_class_is_no_language_model_is_refused_in_a_short_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="transformers has no causal language model") as told:
        targets.load(of_kimi(tmp_path / "kimi"), "cpu", torch.float32)
    assert len(str(told.value)) < 100 + len(str(tmp_path))


def test_they_are_counted_with_the_heads_and_not_with_the_target(tmp_path: Path) -> None:
    folder = checkpoint("deepseek-v3", tmp_path / "target")
    demand = demand_of(folder, {"mtp": folder}, [parse("ar"), parse("mtp:2")], torch.float32)
    assert demand.target.weights_bytes == sum(weight.nbytes for weight in model_of("deepseek-v3").state_dict().values())
    held = heads_of("deepseek-v3").state_dict().values()
    assert demand.drafts["mtp"].weights_bytes == sum(weight.nbytes for weight in held)
    assert demand.drafts["mtp"].place_bytes == (8 + 4) * 4
    assert f"tensors model.layers.{DEPTH}.*: --method mtp drafts with them" in text(inspect(str(folder)))


WRONG: dict[str, tuple[Callable[[], dict[str, Tensor]], str]] = {
    "an embedding of their own": (
        lambda: {"embed_tokens.weight": torch.zeros(VOCABULARY, 32)},
        "with embed_tokens of their own",
    ),
    "a head of their own": (
        lambda: {"shared_head.head.weight": torch.zeros(VOCABULARY, 32)},
        "with shared_head.head of their own",
    ),
    "scales of float8": (
        lambda: {"eh_proj.weight_scale_inv": torch.ones(1, 1)},
        "weight_scale_inv: quantised heads are not supported",
    ),
    "another shape": (
        lambda: {"eh_proj.weight": torch.zeros(32, 32)},
        r"model\.layers\.4\.eh_proj\.weight is \[32, 32\], config",
    ),
    "a tensor too many": (
        lambda: {"self_attn.gate.weight": torch.zeros(1)},
        r"surplus tensor model\.layers\.4\.self_attn\.gate",
    ),
}


@each("what", WRONG)
def test_heads_behind_the_last_layer_that_cannot_be_are_refused(what: str, tmp_path: Path) -> None:
    change, message = WRONG[what]
    folder = checkpoint("glm-4.5", tmp_path / "target")
    add(folder, {f"model.layers.{DEPTH}.{name}": tensor for name, tensor in change().items()})
    with pytest.raises(UserError, match=message) as told:
        mtp_heads.load(folder, SHAPE_OF_TARGET, torch.float32, "cpu")
    assert "\n" not in str(told.value) and str(folder) in str(told.value)


@pytest.mark.parametrize("name", ["2.enorm.weight", "1.self_attn.attention_sink_bias", "1.pre_mlp_layernorm.weight"])
def test_what_a_module_lacks_is_named_as_it_is_stored(name: str, tmp_path: Path) -> None:
    folder = checkpoint("mimo-v2", tmp_path / "target")
    held = load_file(folder / "model.safetensors")
    del held[f"model.mtp.layers.{name}"]
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"missing tensor model\.mtp\.layers\.{re.escape(name)}; copy"):
        mtp_heads.read(folder)


def test_heads_that_share_a_selection_over_tokens_are_refused_by_the_key(tmp_path: Path) -> None:
    folder = checkpoint("glm-5", tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"index_share_for_mtp_iteration": True}))
    with pytest.raises(UserError, match=r"index_share_for_mtp_iteration, GLM-5\.2"):
        mtp_heads.read(folder)
    (note,) = inspect(str(folder)).notes
    assert note.startswith("--method mtp cannot use its MTP heads")


def test_several_modules_are_refused_by_their_number(tmp_path: Path) -> None:
    folder = checkpoint("glm-4.5", tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 3}))
    with pytest.raises(UserError, match="MTP heads of 3 layers are not supported"):
        mtp_heads.read(folder)
