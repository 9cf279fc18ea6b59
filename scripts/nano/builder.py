"""Build the nano models from scratch: tokenizer, target, its answers, all drafts, and model cards.

Stages store their results in the work folder, and are skipped if the result exists; an interrupted stage resumes from
its last checkpoint. Everything is seeded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dflash_bench.models import mtp_heads
from dflash_bench.models.formats import medusa as medusa_format
from dflash_bench.models.formats import save_draft
from dflash_bench.models.nets import dflash as dflash_models
from dflash_bench.models.nets import eagle3 as eagle3_models
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft
from dflash_bench.models.nets.eagle3 import Eagle3Config, Eagle3Draft
from dflash_bench.models.nets.medusa import MedusaHeads
from dflash_bench.training import drafts, medusa, trainer
from dflash_bench.training.contamination import Overlap
from dflash_bench.training.dflash import DFlashObjective, MarkovObjective, SelectorObjective
from dflash_bench.training.drafts import DraftVocab
from dflash_bench.training.eagle3 import Eagle3Objective
from dflash_bench.training.mtp import MTPObjective
from dflash_bench.training.trainer import DraftRecipe, History
from nano import answers, block_diffusion, cards, draft_model, target
from nano.block_diffusion import Noise
from nano.data import corpus_text, load_extra
from nano.target import TargetRecipe
from nano.tokenizer import MASK_TOKEN_ID, NUM_EMBEDDINGS, train_tokenizer

Report = Callable[[str], None]
HALVED = ("draft-model", "medusa", "block-diffusion", "dflash2", "dspark", "mtp")
CONTROL = "dflash-longer"
"""The DFlash draft with the longer training of DFlash 2, to separate its effect. It is not shipped."""
FAMILY = {
    CONTROL: (None, DFlashObjective),
    "dflash2": (drafts.as_dflash2, SelectorObjective),
    "dspark": (drafts.as_dspark, MarkovObjective),
}
"""Drafts initialised from the trained DFlash draft: their network, and their further training."""


@dataclass(frozen=True, slots=True)
class NanoRecipe:
    """Everything that decides the models. The learning rates of DFlash and EAGLE-3 were found by a sweep."""

    target: TargetRecipe = field(default_factory=TargetRecipe)
    num_greedy: int = 8000
    num_sampled: int = 2000
    response_seed: int = 777
    row_length: int = 256
    num_draft_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    block_size: int = 16
    num_anchors: int = 32
    gamma: float = 7.0
    draft_vocab_size: int = 512
    num_ttt_steps: int = 7
    dflash: DraftRecipe = field(default_factory=lambda: DraftRecipe(steps=1200, matrix_lr=0.04, other_lr=0.004))
    eagle3: DraftRecipe = field(default_factory=lambda: DraftRecipe(steps=1200, matrix_lr=0.08, other_lr=0.008))
    num_draft_model_layers: int = 2
    draft_model: DraftRecipe = field(default_factory=lambda: DraftRecipe(steps=800, matrix_lr=0.04, other_lr=0.004))
    num_medusa_heads: int = 4
    medusa: DraftRecipe = field(default_factory=lambda: DraftRecipe(steps=800, matrix_lr=0.02, other_lr=0.002))
    diffusion_block_size: int = 8
    num_diffusion_blocks: int = 16
    rank: int = 64
    num_mtp_steps: int = 6
    dflash2: DraftRecipe = field(default_factory=lambda: DraftRecipe(steps=400, matrix_lr=0.02, other_lr=0.004))
    dspark: DraftRecipe = field(default_factory=lambda: DraftRecipe(steps=400, matrix_lr=0.04, other_lr=0.004))
    mtp: DraftRecipe = field(default_factory=lambda: DraftRecipe(steps=400, matrix_lr=0.02, other_lr=0.002))
    block_diffusion: DraftRecipe = field(default_factory=lambda: DraftRecipe(steps=600, matrix_lr=0.01, other_lr=0.001))


@dataclass(frozen=True, slots=True)
class Builder:
    """A build in a work folder."""

    recipe: NanoRecipe
    work: Path
    report: Report
    extra: Path | None = None
    against: Path | None = None
    """Rows of the public suites, for comparison with the training prompts."""

    def build(self, output: Path) -> None:
        """Run all stages, and write the finished models and their cards to `output`."""
        self.work.mkdir(parents=True, exist_ok=True)
        tokenizer = self.tokenizer()
        model, target_history = self.target(tokenizer)
        self.rows(model, tokenizer)
        histories = {
            "dflash": self.dflash(),
            "eagle3": self.eagle3(),
            "draft-model": self.draft_model(model),
            "medusa": self.medusa(),
            "block-diffusion": self.block_diffusion(model, tokenizer),
            "dflash2": self.family("dflash2", self.recipe.dflash2),
            "dspark": self.family("dspark", self.recipe.dspark),
            "mtp": self.mtp(model),
        }
        self.family(CONTROL, self.recipe.dflash2)
        self.export(output, tokenizer, model, {"target": target_history, **histories})

    def tokenizer(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        folder = self.work / "tokenizer"
        if not folder.exists():
            self.report("tokenizer: learning from 20,000 tasks")
            train_tokenizer(corpus_text(11, 20_000)).save_pretrained(folder)
        return PreTrainedTokenizerFast.from_pretrained(folder)

    def target(self, tokenizer: Any) -> tuple[Any, History]:
        extra = load_extra(self.extra) if self.extra else []
        return target.train(self.recipe.target, tokenizer, self.work / "target.pt", self.report, extra)

    def rows(self, model: Any, tokenizer: Any) -> None:
        """Store the target's own answers, and its hidden states on them."""
        recipe, path = self.recipe, self.work / "responses.pt"
        if not path.exists():
            items = answers.collect(
                model,
                tokenizer,
                recipe.num_greedy,
                recipe.num_sampled,
                recipe.response_seed,
                recipe.row_length,
                self.report,
            )
            trainer.save_whole(path, [(item.ids, item.prompt_length) for item in items])
        if not (self.work / "rows.pt").exists():
            items = [answers.Conversation(*pair) for pair in torch.load(path, weights_only=True)]
            layers = tuple(sorted({*self._five(), *self._three()}))
            answers.compute(model, items, layers, self.work, recipe.row_length, tokenizer.pad_token_id, 5, self.report)

    def _five(self) -> tuple[int, ...]:
        return dflash_models.default_target_layers(self.recipe.target.layers, 5)

    def _three(self) -> tuple[int, ...]:
        return eagle3_models.default_target_layers(self.recipe.target.layers)

    def embedding(self) -> torch.Tensor:
        return self._target_weight("model.embed_tokens.weight")

    def vocab(self) -> DraftVocab:
        return DraftVocab.of(self.embedding(), self.embedding())

    def _target_weight(self, name: str) -> torch.Tensor:
        weight: torch.Tensor = torch.load(self.work / "target.pt", weights_only=True)["model"][name]
        return weight

    def new_dflash(self) -> DFlashDraft:
        """Return a fresh draft with the target's final norm, because it uses the target's head."""
        recipe, size = self.recipe, self.recipe.target
        config = DFlashConfig(
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_layers=recipe.num_draft_layers,
            num_heads=recipe.num_heads,
            num_kv_heads=recipe.num_kv_heads,
            head_dim=64,
            vocab_size=NUM_EMBEDDINGS,
            block_size=recipe.block_size,
            mask_token_id=MASK_TOKEN_ID,
            target_layer_ids=self._five(),
            num_target_layers=size.layers,
        )
        draft = DFlashDraft(config)
        dflash_models.initialise(draft, recipe.dflash.seed)
        draft.norm.weight.data.copy_(self._target_weight("model.norm.weight"))
        return draft

    def new_eagle3(self, rows: answers.Rows) -> Eagle3Draft:
        """Return a fresh draft with the target's norm and head, for the most frequent answer tokens only."""
        recipe, size = self.recipe, self.recipe.target
        config = Eagle3Config(
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_heads=recipe.num_heads,
            num_kv_heads=recipe.num_kv_heads,
            head_dim=64,
            vocab_size=NUM_EMBEDDINGS,
            draft_vocab_size=recipe.draft_vocab_size,
            target_layer_ids=self._three(),
            num_target_layers=size.layers,
        )
        draft = Eagle3Draft(config)
        dflash_models.initialise(draft, recipe.eagle3.seed)
        counts = torch.bincount(rows.ids[rows.answer], minlength=NUM_EMBEDDINGS)
        draft.d2t, draft.t2d = eagle3_models.vocabulary_map(counts, recipe.draft_vocab_size)
        ids = torch.arange(recipe.draft_vocab_size) + draft.d2t
        draft.lm_head.weight.data.copy_(self.embedding()[ids])
        draft.norm.weight.data.copy_(self._target_weight("model.norm.weight"))
        return draft

    def dflash(self, recipe: DraftRecipe | None = None, name: str = "dflash") -> History:
        rows = answers.load(self.work)
        objective = DFlashObjective(
            self.new_dflash(), rows, self.vocab(), self.recipe.num_anchors, self.recipe.gamma, compiled=True
        )
        return trainer.train(objective, rows, recipe or self.recipe.dflash, self.work / f"{name}.pt", self.report)

    def new_family(self, name: str) -> DFlashDraft:
        """Return a draft of `FAMILY`, initialised from the trained DFlash draft."""
        draft, (grow, _) = self.new_dflash(), FAMILY[name]
        draft.load_state_dict(self._trained("dflash"))
        return draft if grow is None else grow(draft, self.vocab(), self.recipe.rank, self.recipe.dflash2.seed)

    def family(self, name: str, recipe: DraftRecipe) -> History:
        rows, (_, kind) = answers.load(self.work), FAMILY[name]
        objective = kind(self.new_family(name), rows, self.vocab(), self.recipe.num_anchors, self.recipe.gamma)
        return trainer.train(objective, rows, recipe, self.work / f"{name}.pt", self.report)

    def mtp(self, model: Any) -> History:
        rows = answers.load(self.work)
        heads = drafts.new_mtp(model, self.recipe.mtp.seed)
        objective = MTPObjective(heads, rows, self.vocab(), self.recipe.num_mtp_steps)
        return trainer.train(objective, rows, self.recipe.mtp, self.work / "mtp.pt", self.report)

    def eagle3(self, recipe: DraftRecipe | None = None, name: str = "eagle3") -> History:
        rows = answers.load(self.work)
        objective = Eagle3Objective(self.new_eagle3(rows), rows, self.vocab(), self.recipe.num_ttt_steps)
        return trainer.train(objective, rows, recipe or self.recipe.eagle3, self.work / f"{name}.pt", self.report)

    def new_draft_model(self, model: Any) -> Any:
        norm = self._target_weight("model.norm.weight")
        layers, seed = self.recipe.num_draft_model_layers, self.recipe.draft_model.seed
        return draft_model.new_model(model.config, layers, self.embedding(), norm, seed)

    def draft_model(self, model: Any) -> History:
        rows = answers.load(self.work)
        objective = draft_model.DraftModelObjective(self.new_draft_model(model), rows, self.embedding())
        return trainer.train(objective, rows, self.recipe.draft_model, self.work / "draft-model.pt", self.report)

    def new_medusa(self) -> MedusaHeads:
        return drafts.new_medusa(self.embedding(), self.recipe.num_medusa_heads)

    def medusa(self) -> History:
        rows = answers.load(self.work)
        objective = medusa.MedusaObjective(self.new_medusa(), rows)
        return trainer.train(objective, rows, self.recipe.medusa, self.work / "medusa.pt", self.report)

    def block_diffusion(self, model: Any, tokenizer: Any) -> History:
        recipe, rows = self.recipe, answers.load(self.work)
        noise = Noise(recipe.diffusion_block_size, recipe.num_diffusion_blocks, MASK_TOKEN_ID, tokenizer.eos_token_id)
        objective = block_diffusion.BlockDiffusionObjective(block_diffusion.new_model(model), rows, noise)
        return trainer.train(objective, rows, recipe.block_diffusion, self.work / "block-diffusion.pt", self.report)

    def sweep(self, rates: tuple[float, ...], steps: int) -> dict[str, dict[str, float]]:
        """Return held-out acceptance lengths after short trainings at each rate; the recipe has the best rates."""
        found: dict[str, dict[str, float]] = {"dflash": {}, "eagle3": {}}
        for rate in rates:
            recipe = DraftRecipe(steps=steps, matrix_lr=rate, other_lr=rate / 10)
            for name, run in (("dflash", self.dflash), ("eagle3", self.eagle3)):
                found[name][str(rate)] = run(recipe, f"sweep-{name}-{rate}")[-1]["accepted"]
        (self.work / "sweep.json").write_text(json.dumps(found, indent=1))
        return found

    def export(self, output: Path, tokenizer: Any, model: Any, histories: dict[str, History]) -> None:
        self.report("export: writing models and cards")
        rows = answers.load(self.work)
        model.config.use_cache = True
        model.generation_config.use_cache = True
        model.save_pretrained(output / "target")
        tokenizer.save_pretrained(output / "target")
        # Readable by all users of an installed package.
        os.chmod(output / "target" / "model.safetensors", 0o644)
        for name, draft in (("dflash", self.new_dflash()), ("eagle3", self.new_eagle3(rows))):
            draft.load_state_dict(self._trained(name))
            save_draft(draft, output / name)
        self._export_halved(output, model)
        sweep = self.work / "sweep.json"
        cards.write(
            output,
            recipe=asdict(self.recipe),
            histories=histories,
            sweep=json.loads(sweep.read_text()) if sweep.exists() else {},
            num_rows=len(rows.ids),
            num_answer_tokens=int(rows.answer.sum()),
            extra=self.extra,
            overlaps=self._overlaps(),
            acceptance=self._acceptance(output),
        )

    def _acceptance(self, output: Path) -> cards.AcceptedBySuite:
        """Measure the drafts of the DFlash family and the control."""
        block = self.new_family(CONTROL)
        block.load_state_dict(self._trained(CONTROL))
        save_draft(block, self.work / CONTROL)
        drafts = {"dflash": output / "dflash", "dflash@longer": self.work / CONTROL}
        drafts |= {"dflash@2": output / "dflash2", "dflash@dspark": output / "dspark"}
        return cards.acceptance(output / "target", drafts, self.work / "acceptance")

    def _overlaps(self) -> dict[str, tuple[Sequence[Overlap], int]]:
        recipe, num_answers = self.recipe, self.recipe.num_greedy + self.recipe.num_sampled
        return {
            "target": (cards.overlaps_of_target(recipe.target, self.against), recipe.target.steps * cards.A_STEP),
            "drafts": (cards.overlaps_of_drafts(recipe.response_seed, num_answers, self.against), num_answers),
        }

    def _export_halved(self, output: Path, model: Any, names: Sequence[str] = HALVED) -> None:
        """Write the larger models in float16 to keep the package small."""
        for name in names:
            match name:
                case "medusa":
                    heads = self.new_medusa()
                    heads.load_state_dict(self._trained(name))
                    medusa_format.save(heads.half(), output / name, "nano")
                case "dflash2" | "dspark":
                    block = self.new_family(name)
                    block.load_state_dict(self._trained(name))
                    save_draft(block.half(), output / name, "specforge" if name == "dspark" else None)
                case "mtp":
                    mtp_draft = drafts.new_mtp(model, self.recipe.mtp.seed)
                    mtp_draft.load_state_dict(self._trained(name))
                    of_target = json.loads((output / "target" / "config.json").read_text())
                    mtp_heads.save(mtp_draft.half(), output / name, of_target)
                case "draft-model":
                    self._export_model(output / name, self.new_draft_model(model))
                case "block-diffusion":
                    diffusing = block_diffusion.new_model(model)
                    sizes = {"block_size": self.recipe.diffusion_block_size, "mask_token_id": MASK_TOKEN_ID}
                    diffusing.config.block_diffusion = sizes
                    self._export_model(output / name, diffusing)

    def _export_model(self, folder: Path, model: Any) -> None:
        model.load_state_dict(self._trained(folder.name))
        model.config.use_cache = True
        model.half().save_pretrained(folder)
        os.chmod(folder / "model.safetensors", 0o644)

    def _trained(self, name: str) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = torch.load(self.work / f"{name}.pt", weights_only=True)["model"]
        return weights
