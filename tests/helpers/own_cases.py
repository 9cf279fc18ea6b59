"""Golden cases that no publisher's code made: targets with experts, whose drafts are computed by our own books.

`golden_of` is what `by_the_book.py` and the formula of `test_mtp.py` say of a case's files, which a test compares with
what is shipped. `python own_cases.py` makes files and cases anew: drafts are trained on the very texts that they are
asked for, as far as some of what they draft is accepted.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_bench.diagnose.golden_cases import edited_copy
from dflash_bench.models import mtp_heads
from dflash_bench.models.formats import save_draft
from dflash_bench.training import drafts, trainer
from dflash_bench.training.data import Batch
from dflash_bench.training.dflash import DFlashObjective
from dflash_bench.training.drafts import DraftVocab
from dflash_bench.training.mtp import MTPObjective
from helpers.by_the_book import Book, states_of
from helpers.drafts.mtp import Formula
from helpers.golden_drafts import CASES
from helpers.tiny_architectures import made
from nano.answers import Rows

DFLASH, MTP = "book-dflash-experts", "book-mtp-experts"
KINDS = {DFLASH: "mixture of experts", MTP: "qwen3.5, experts"}
NUM_PROMPTS, NEW, BLOCK, NUM_MTP = 4, 28, 6, 3
SAMPLING = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
BOOKS = "dflash-bench, its tests' own formulas (no publisher's code)"
WHAT = {
    DFLASH: "DFlash in z-lab's format beside a Qwen3 target with experts (4, of which 2 compute each token). Ours: the "
    "rounds are those of a formula written from the published description; SpecForge's code (a6b6b023) drafts the "
    "same.",
    MTP: "MTP heads with experts under `mtp.*` in the checkpoint of a Qwen3.5 target with experts, one tensor for each "
    "expert's matrix. Ours: the rounds are those of a formula written from the published description; speculators' "
    "code (c05b95b3) drafts the same.",
}
LEAST_GAP = 1e-3
"""In logits: what float32 decides under every forward."""
NUM_STEPS = {DFLASH: 30, MTP: 150}
NOISE = 0.02
Prompts = Sequence[Sequence[int]]
Drafts = Callable[[list[int]], tuple[list[int], float]]
"""From a text to the tokens drafted behind it, and the least distance between best and second best in any choice."""


def prompts_of(seed: int) -> Prompts:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 97, (18 + 2 * i,), generator=generator).tolist() for i in range(NUM_PROMPTS)]


@cache
def target_of(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def plain(model: Any, prompt: Sequence[int], num: int) -> tuple[list[int], float]:
    """Prompt and greedy answer, without a cache, and the least distance between its best and second best tokens."""
    text, gap = list(prompt), float("inf")
    for _ in range(num):
        best = model(torch.tensor([text])).logits[0, -1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        text.append(int(best.indices[0]))
    return text, gap


def rounds_of(text: list[int], start: int, drafted: Drafts) -> tuple[list[dict[str, Any]], float]:
    """The rounds of an answer that begins at `start`; `text` goes on behind its end by more than a block."""
    rounds, at, gap = [], start, float("inf")
    while at < start + NEW - 1:
        tokens, margin = drafted(text[: at + 1])
        accepted = next((i for i, token in enumerate(tokens) if token != text[at + 1 + i]), len(tokens))
        rounds.append({"anchor_at": at, "anchor": text[at], "drafted": tokens, "accepted": accepted})
        gap, at = min(gap, margin), at + accepted + 1
    return rounds, gap


def by_book(book: Book, model: Any, text: list[int]) -> Drafts:
    states = states_of(model, text, book.key("target_layer_ids"))

    def drafted(before: list[int]) -> tuple[list[int], float]:
        found = book.drafts(states, before)
        return found.tokens, found.margin

    return drafted


def by_formula(formula: Formula) -> Drafts:
    def drafted(before: list[int]) -> tuple[list[int], float]:
        tokens, logits = formula.drafts(before, NUM_MTP)
        best = logits.topk(2).values
        return tokens, float((best[:, 0] - best[:, 1]).min())

    return drafted


class BeforeTheNorm(Formula):
    """Reads the target's last states before its final norm."""

    def last_states(self, text: Sequence[int]) -> Tensor:
        states: list[Tensor] = []
        hook = self.model.get_decoder().norm.register_forward_hook(lambda _norm, given, _out: states.append(given[0]))
        super().last_states(text)
        hook.remove()
        return states[0][0]


class OwnToken(Formula):
    """Pairs a state with its own token, and not with the one behind it."""

    def drafts(self, text: Sequence[int], num_drafts: int) -> tuple[list[int], Tensor]:
        return super().drafts([text[0], *text[:-1]], num_drafts)


def golden_of(name: str, asked: Prompts) -> dict[str, Any]:
    folder = CASES / name
    shared = folder.parent / "_targets" / "experts"
    model = target_of(shared if name == DFLASH else folder / "target")
    cases, gaps = [], []
    texts = [plain(model, prompt, NEW + BLOCK + 2) for prompt in asked]
    with TemporaryDirectory() as place:
        ways = dict(_ways(name, folder, model, Path(place)))
    found = {
        what: [rounds_of(text, len(prompt), way(text)) for prompt, (text, _) in zip(asked, texts, strict=True)]
        for what, way in ways.items()
    }
    for prompt, (text, gap), (rounds, margin) in zip(asked, texts, found["right"], strict=True):
        answer = text[len(prompt) : len(prompt) + NEW]
        gaps.append(min(gap, margin))
        cases.append({"prompt": list(prompt), "max_new_tokens": NEW, "tokens": answer, "rounds": rounds})
    counts = {what: [step["accepted"] for rounds, _ in each for step in rounds] for what, each in found.items()}
    num = BLOCK - 1 if name == DFLASH else NUM_MTP
    readings = [
        {
            "reading": what,
            **({"edit": EDITS[what]} if what in EDITS else {}),
            "prompts_with_other_rounds": sum(
                one != right for (one, _), (right, _) in zip(each, found["right"], strict=True)
            ),
            "prompts": len(each),
            "accepted_per_round": float(f"{sum(counts[what]) / len(counts[what]):.4g}"),
        }
        for what, each in found.items()
        if what != "right"
    ]
    drawn = [_drawn(folder, model, texts[i][0], len(asked[i])) for i in range(2)] if name == DFLASH else []
    return {
        "format": 1,
        "kind": "dflash" if name == DFLASH else "mtp",
        "target": "../_targets/experts" if name == DFLASH else "target",
        "what": WHAT[name],
        "source": {"repository": BOOKS, "file": "tests/helpers/own_cases.py", "entry": "`golden_of`"},
        "settings": {"temperature": 0, "block_size": BLOCK if name == DFLASH else None, "drafts_per_round": num},
        "accepted_per_round": float(f"{sum(counts['right']) / len(counts['right']):.4g}"),
        "accepted_seen": sorted({*counts["right"]}),
        "least_gap": min(gaps),
        "wrong_readings": readings,
        "cases": cases,
        **({"sampled": drawn} if drawn else {}),
    }


EDITS: dict[str, dict[str, Any]] = {
    "target layers counted one lower": {"dflash_config.target_layer_ids": [0, 1]},
    "causal block": {"is_causal": True},
}


def _ways(name: str, folder: Path, model: Any, place: Path) -> Iterator[tuple[str, Callable[[list[int]], Drafts]]]:
    """How the case is read rightly, and each misreading."""
    if name == DFLASH:
        right = Book(folder / "draft", model)
        yield "right", lambda text: by_book(right, model, text)
        for what, edit in EDITS.items():
            other = Book(edited_copy(folder / "draft", edit, place / what), model)
            yield what, lambda text, other=other: by_book(other, model, text)  # type: ignore[misc]
        return
    heads = mtp_heads.load(folder / "target", _shape(model), torch.float32, "cpu")
    readings = {
        "right": Formula,
        "states before the target's final norm": BeforeTheNorm,
        "a state is paired with its own token": OwnToken,
    }
    for what, formula in readings.items():
        yield what, lambda _text, formula=formula: by_formula(formula(heads, model))  # type: ignore[misc]


def _shape(model: Any) -> Any:
    config = model.config.get_text_config()
    return mtp_heads.TargetShape(config.hidden_size, config.vocab_size, config.num_hidden_layers)


@torch.inference_mode()
def _drawn(folder: Path, model: Any, text: list[int], anchor: int) -> dict[str, Any]:
    """A block behind an anchor, whose tokens are the second likeliest: q of the draft and p of the target."""
    book = Book(folder / "draft", model)
    states = [one[:anchor] for one in states_of(model, text, book.key("target_layer_ids"))]
    q = filtered(book.head(book.hidden(states, anchor, text[anchor])[1:]))
    tokens = q.topk(2).indices[:, 1].tolist()
    p = filtered(model(torch.tensor([[*text[: anchor + 1], *tokens]])).logits[0, anchor:-1])
    slots = []
    for token, *rows in zip(tokens, q, p, strict=True):
        slot: dict[str, Any] = {"token": token}
        for part, row in zip("qp", rows, strict=True):
            best = row.topk(6)
            slot |= {f"{part}_ids": best.indices.tolist(), f"{part}_support": int((row > 0).sum())}
            slot[part] = [float(f"{value:.6g}") for value in best.values.tolist()]
        slots.append(slot)
    return {"prompt": text[:anchor], "anchor": text[anchor], **SAMPLING, "slots": slots}


def filtered(logits: Tensor) -> Tensor:
    """Probabilities [N, V] at the temperature, of the top k tokens, of these the fewest that hold the top p."""
    out = torch.zeros_like(logits)
    for row, values in zip(out, logits / SAMPLING["temperature"], strict=True):
        ids = values.argsort(descending=True)[: int(SAMPLING["top_k"])]
        shares, total, kept = values[ids].softmax(0), 0.0, 0
        while total < SAMPLING["top_p"]:
            total, kept = total + float(shares[kept]), kept + 1
        row[ids[:kept]] = shares[:kept] / shares[:kept].sum()
    return out


# Making the files.


def main() -> None:
    for name, kind in KINDS.items():
        place = CASES / "_targets/experts" if name == DFLASH else CASES / name / "target"
        _target(kind).bfloat16().save_pretrained(place)
        (place / "generation_config.json").unlink()
        (place / "model.safetensors").chmod(0o644)
        for seed in range(100):
            golden = _case(name, place, prompts_of(seed))
            told = {key: golden[key] for key in ("least_gap", "accepted_per_round", "accepted_seen")}
            print(name, seed, told, [one["prompts_with_other_rounds"] for one in golden["wrong_readings"]], flush=True)  # noqa: T201
            readings_show = all(one["prompts_with_other_rounds"] for one in golden["wrong_readings"])
            if golden["least_gap"] > LEAST_GAP and len(golden["accepted_seen"]) > 2 and readings_show:
                break
        (CASES / name / "golden.json").write_text(json.dumps(golden) + "\n")
        (CASES / name / "README.md").write_text(_readme(name, golden))


def _readme(name: str, golden: dict[str, Any]) -> str:
    accepted, seen = golden["accepted_per_round"], golden["accepted_seen"]
    lines = [
        f"# {name}",
        "",
        golden["what"],
        "",
        f"Source: {BOOKS}, `tests/helpers/own_cases.py`, which makes it anew.",
        f"{NUM_PROMPTS} prompts, greedy. Accepted drafts per round: {accepted} on average, values seen {seen}.",
        "",
        "What a reader that computes something else would give:",
        *(
            f"- {one['reading']}: other rounds in {one['prompts_with_other_rounds']} of {one['prompts']} prompts "
            f"({one['accepted_per_round']} accepted per round instead of {accepted})"
            for one in golden["wrong_readings"]
        ),
    ]
    return "\n".join(lines) + "\n"


def _target(kind: str) -> Any:
    """Norms are random, too: who reads a state on the wrong side of one reads another. Logits are far apart."""
    model = copy.deepcopy(made(kind))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        model.get_output_embeddings().weight *= 8
    return model


def _case(name: str, place: Path, asked: Prompts) -> dict[str, Any]:
    """Fit a draft to the answers, write it, and return what it drafts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    vocab = DraftVocab.of(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    rows = _rows(model, asked)
    network: Any
    objective: Any
    if name == DFLASH:
        network = drafts.new_dflash(model, (1, 2), 2, BLOCK, 1, 3)
        objective = DFlashObjective(network, rows, vocab, 12, 3.0)
    else:
        network = drafts.new_mtp(model, 3)
        objective = MTPObjective(network, rows, vocab, NUM_MTP)
    _fit(objective, network, NUM_STEPS[name])
    if name == DFLASH:
        save_draft(network.bfloat16(), CASES / name / "draft", "zlab")
    else:
        _into(place, network.bfloat16().state_dict())
    return golden_of(name, asked)


def _rows(model: Any, asked: Prompts) -> Rows:
    texts = [plain(model, prompt, NEW + BLOCK)[0] for prompt in asked]
    length = max(map(len, texts))
    ids = torch.tensor([text + [0] * (length - len(text)) for text in texts])
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    kept = torch.stack([states[2], states[3], states[-1]], dim=2)
    position = torch.arange(length).repeat(len(ids), 1)
    real = torch.tensor([[len(p) <= at < len(t) for at in range(length)] for p, t in zip(asked, texts, strict=True)])
    return Rows(Batch(ids, real.float(), torch.zeros_like(position), position), kept.numpy(), (1, 2))


def _fit(objective: Any, network: Any, num_steps: int) -> None:
    matrices, others = ([p for p in network.parameters() if (p.ndim == 2) == wanted] for wanted in (True, False))
    steps = trainer.optimisers(matrices, others, 0.02, 0.01)
    for step in range(num_steps):
        objective.loss([*range(NUM_PROMPTS)], step).backward()
        trainer.apply_gradients(steps, network.parameters())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += NOISE * torch.randn(parameter.shape, generator=generator)


def _into(place: Path, heads: dict[str, Tensor]) -> None:
    """Add heads to a target's checkpoint, its experts one by one."""
    stored = load_file(place / "model.safetensors")
    tensors = {key: tensor for key, tensor in stored.items() if not mtp_heads.is_of_heads(key)}
    for name, tensor in heads.items():
        if name.endswith("experts.gate_up_proj"):
            for i, (gate, up) in enumerate(one.chunk(2) for one in tensor):
                tensors[f"mtp.{name.removesuffix('gate_up_proj')}{i}.gate_proj.weight"] = gate.contiguous()
                tensors[f"mtp.{name.removesuffix('gate_up_proj')}{i}.up_proj.weight"] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            for i, one in enumerate(tensor):
                tensors[f"mtp.{name.removesuffix('down_proj')}{i}.down_proj.weight"] = one.contiguous()
        else:
            tensors[f"mtp.{name}"] = tensor
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    path = place / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "mtp_num_hidden_layers": 1}, indent=1))


if __name__ == "__main__":
    main()
