"""DFlash drafting: one pass of the draft network fills a block of masks behind the anchor (arXiv 2602.06036, 4.1).

A block is [anchor, mask, ..., mask]. The target's tapped features H_t = RMSNorm(W_c [H^(l1); ...; H^(lK)]) become keys
and values of every draft layer once, when the target commits tokens (KV injection), and stay in the draft's own cache;
a round then costs a single pass over the block. The block attends to itself in both directions and to the context,
which is strictly before the anchor, as in training: the anchor's own features do not exist yet.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import Method
from dflash_bench.engine.adaptive import AdaptiveLength
from dflash_bench.engine.cache import on_host, rotations, to_device
from dflash_bench.engine.drafter import Committed, Kept
from dflash_bench.engine.drafters.base import CachedDrafter, DraftSampler, joined
from dflash_bench.engine.drafters.correction import BlockCorrector
from dflash_bench.engine.forward.choice import why_not_layers
from dflash_bench.engine.forward.layers import Product
from dflash_bench.engine.forward.native_drafts import DFlashNetwork, NativeDFlash
from dflash_bench.engine.graphs import ANY
from dflash_bench.engine.lengths import Seen, placed_lengths
from dflash_bench.engine.masks import block_mask, causal_mask
from dflash_bench.engine.target import Target, part_size
from dflash_bench.engine.verify import Draft
from dflash_bench.models.loading import Models
from dflash_bench.models.nets.bodies import JETSPEC, WHOLE, BlockView, Mixing
from dflash_bench.models.nets.corrections.base import Corrected
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.weights import lay_out


def build(models: Models, target: Target, method: Method) -> DFlashDrafter:
    """Build the drafter. Raises UserError for options that this kind of draft does not have."""
    draft = with_labels(models.draft_of(method), method)
    steps, rule, cut = method.number("steps"), str(method.option("rule")), method.option("cut")
    _refuse(draft, method)
    embedding, head = target.embedding, target.head
    if method.option("block") == "auto":
        return AutoDFlashDrafter(draft, embedding, head, rule=rule, steps=steps)
    size = block_size(draft, method)
    if draft.config.body.is_autoregressive:
        return AutoregressiveDrafter(draft, embedding, head, size, rule)
    if cut == "auto":
        return AutoCutDFlashDrafter(draft, embedding, head, size, rule)
    if cut != "off":
        return CutDFlashDrafter(draft, embedding, head, size, rule, threshold=method.real("cut"))
    return DFlashDrafter(draft, embedding, head, size, rule, steps)


def _refuse(draft: DFlashDraft, method: Method) -> None:
    """Raise UserError for options that this kind of draft does not have, or that contradict each other."""
    correction, where = draft.config.correction, f"method '{method.label}'"
    if correction is not None and method.number("steps") > 1:
        raise UserError(f"{where}: the head of a {draft.config.kind} draft corrects a single pass; leave steps out")
    if draft.config.body.is_autoregressive and (method.number("steps") > 1 or method.option("block") == "auto"):
        raise UserError(f"{where}: an autoregressive draft has no block to cut or to repeat; leave block and steps out")
    if (cut := method.option("cut")) == "off":
        return
    if correction is None or not correction.has_confidence:
        raise UserError(f"{where}: this {draft.config.kind} draft has no confidence head to cut by; leave cut out")
    if method.option("block") == "auto":
        raise UserError(f"{where}: block=auto and cut both say how much is verified; give one of them")
    if cut == "auto" and method.option("rule") == "rejection":
        raise UserError(
            f"{where}: cut=auto looks at all drawn tokens, and tokens selected by their own value do not follow q any "
            "more; give a threshold"
        )


def refuse_autoregressive(draft: DFlashDraft, method: Method) -> None:
    """Raise UserError for a draft that has no block to make something else of."""
    if draft.config.body.is_autoregressive:
        raise UserError(f"method '{method.label}': an {draft.config.kind} draft drafts no block; use dflash")


def with_labels(draft: DFlashDraft, method: Method) -> DFlashDraft:
    """Return the draft with the labels given by the option `shift`, for kinds whose files do not specify them.

    The copy shares the weights. Raises UserError for other kinds.
    """
    shift = method.option("shift")
    if shift is None:
        return draft
    if draft.config.kind != JETSPEC:
        raise UserError(
            f"method '{method.label}': the labels of a {draft.config.kind} draft are known; leave shift out"
        )
    shifted = copy.copy(draft)
    shifted.config = replace(draft.config, shifted_labels=shift == "yes")
    return shifted


def block_size(draft: DFlashDraft, method: Method) -> int:
    """Return the block size from the options `n` or `block`, by default the draft's training size.

    Raises UserError for a larger block than the weights of its head support.
    """
    config = draft.config
    if method.option("n") is not None:
        size = config.block_for(method.number("n"))
    else:
        size = config.block_size if method.option("block") is None else method.number("block")
    if config.has_fixed_slots and size > config.block_size:
        most = config.num_drafts(config.block_size)
        raise UserError(f"method '{method.label}': the head of this {config.kind} draft drafts at most {most} tokens")
    return size


class DFlashDrafter(CachedDrafter):
    """Drafts a chain of `num_predicted` tokens from one block.

    `embedding` and `head` are the target's, unless the draft has its own. A tree made from a block (`ddtree.py`) may
    have more or fewer nodes than `num_predicted`.
    """

    reads_confidence = False
    """Whether drafts are cut by the confidences of the draft's head."""

    def __init__(
        self,
        draft: DFlashDraft,
        embedding: nn.Module,
        head: Product,
        block_size: int | None = None,
        rule: str = "match",
        steps: int = 1,
    ) -> None:
        self.block_size = block_size or draft.config.block_size
        self.steps = steps
        self.num_predicted, self.slots = draft.config.num_drafts(self.block_size), draft.config.slots(self.block_size)
        super().__init__(draft, self.block_size)
        self.network: DFlashNetwork = NativeDFlash(self.draft)
        self.embedding = raw_rows(draft.embed_tokens if self.config.own_embedding else embedding)
        self.head: Product = lay_out(draft.lm_head) if self.config.own_head else head
        self.num_drafts = self.num_predicted
        self.mixing = self.config.body.mixing
        if self.mixing is Mixing.ABSENT:
            self.taps = ()
        self.draft_sampler = DraftSampler(rule, draft.target_ids, self.config.draft_vocab_size)
        self.corrector = BlockCorrector.of(draft, self.draft_sampler, self.reads_confidence)

    def compile(self) -> None:
        network, head = self.network, self.head
        if not isinstance(network, NativeDFlash) or not self.config.body.has_usual_attention:
            return
        if self.mixing.passes_layers:
            return
        if why_not_layers(network.plain_layers):
            return
        from dflash_bench.engine.forward.compiled import CompiledLinear, lookup_of
        from dflash_bench.engine.forward.compiled_drafts import CompiledDFlash, compiled_once

        self.network = compiled_once(self.draft, lambda: CompiledDFlash(network))
        self.embedding = lookup_of(self.embedding)
        if isinstance(head, nn.Linear):
            self.head = CompiledLinear.of(head)

    def allocate(self, num_rows: int, capacity: int) -> None:
        self.block = torch.full((num_rows, self.block_size), self.config.mask_token_id, device=self.device)
        self.columns = torch.arange(capacity, device=self.device)
        views = {view.name: view for view in map(self.config.body.view, range(self.config.num_layers))}
        self.views = views
        # Attention by lengths is limited to the cases tried on this device (`lengths.is_right`).
        self.by_lengths = self.by_lengths and {*views.values()} == {WHOLE} and not self.config.body.has_sinks
        if self.corrector is not None:
            self.corrector.begin(num_rows)

    def observe(self, committed: Committed) -> None:
        """Store keys and values of the committed tokens' features [B, M, K * H], and put the anchor into the block."""
        self.draft_sampler.sampler = committed.sampler
        if self.mixing.passes_layers:
            self._pass(committed)
        else:
            self._store(committed)
        if committed.anchor is not None:
            self.block[committed.row_slice, 0] = committed.anchor
        if self.corrector is not None:
            self.corrector.observe(committed)
        self.advance(committed)

    def _store(self, committed: Committed) -> None:
        """Store keys and values of the committed tokens' features, by a captured pass if there is one."""
        assert committed.hidden is not None
        if committed.is_prompt or not self._keep_captured(committed.starts, committed.hidden):
            self.cache.place(committed.starts, committed.hidden.shape[1], committed.first)
            self._keep(committed.hidden)

    def _pass(self, committed: Committed) -> None:
        """Store keys and values of the committed tokens, which pass through the layers, in parts."""
        width = committed.tokens.shape[1]
        read = [
            [*text[start : start + width], *[0] * width][:width]
            for text, start in zip(committed.texts, committed.starts, strict=True)
        ]
        tokens, size = to_device(read, self.device), part_size(self.device)
        for at in range(0, width, size):
            part = tokens[:, at : at + size]
            features = None if committed.hidden is None else committed.hidden[:, at : at + size]
            self.cache.place([start + at for start in committed.starts], part.shape[1], committed.first)
            inputs = self.draft.context_inputs(self.embedding(part), features)
            mask = causal_mask(self.cache, self.weight.dtype)
            self.network.forward(inputs, rotations(self.rotary, self.cache), mask, self.cache)

    def _keep(self, features: Tensor) -> Tensor:
        """Store keys and values of features [B, M, K * H] where they were placed, and return them."""
        context = self.network.context(features, rotations(self.rotary, self.cache))
        self.cache.write_all(context)
        return context

    def _keep_captured(self, starts: Sequence[int], features: Tensor) -> bool:
        """Run `_keep` as a captured pass; return False if there is none.

        The pass has the width of the longest round, so that it fits all rounds: tokens behind a row's end are masked,
        and overwritten later.
        """
        if self.graph_cache is None or not self.graph_cache.captures_small:
            return False
        whole = pad(features, (0, 0, 0, self.num_drafts + 1 - features.shape[1]))
        inputs = (whole, on_host(starts, self.device))
        return self.graph_cache.replay(("keep", *whole.shape[1:]), self._steady_keep, ANY, *inputs) is not None

    def _steady_keep(self, _num_places: int, features: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
        """Run `_keep`, placed by tensors alone, so that it can be captured."""
        self.cache.place_at(starts, features.shape[1], self.cache.capacity)
        return (self._keep(features),)

    def propose(self) -> Draft:
        corrected, probs = self.draft_tokens(self.block_logits())
        return Draft(corrected.tokens, probs=probs)

    @property
    def is_steady(self) -> bool:
        return self.steps == 1 and self.draft_sampler.is_steady and not self.mixing.passes_layers

    def drafted_at(self, num_places: int, anchor: Tensor, starts: Tensor) -> Tensor:
        self.block[:, 0] = anchor
        (hidden,) = self._steady(num_places, self.block, starts)
        logits = self._logits(hidden)
        if self.corrector is None:
            return self.draft_sampler.sample(logits)[0]
        inputs = self.corrector.inputs(hidden, logits, self.block[:, :1])
        return self.corrector.correct(inputs, self.slots, self.embedding)[0].tokens

    def kept_at(self, num_places: int, kept: Kept) -> None:
        self._steady_keep(num_places, kept.hidden, kept.starts)
        if self.corrector is not None:
            self.corrector.keep(kept.newest[:, 0], kept.num_accepted + 1, kept.hidden, slice(None))

    def draft_tokens(self, logits: Tensor) -> tuple[Corrected, Tensor | None]:
        """Return the drafted tokens for logits [B, num_predicted, Vd], and their q [B, num_predicted, V] if drawn.

        The logits must come from the last pass: a correction head reads its hidden states, too.
        """
        if self.corrector is None:
            tokens, probs = self.draft_sampler.sample(logits)
            return Corrected(tokens), probs
        inputs = self.corrector.inputs(self.hidden, logits, self.block[:, :1])
        if (chosen := self._chosen_captured(inputs)) is not None:
            return chosen, None
        corrected, probs = self.corrector.correct(inputs, self.slots, self.embedding)
        if self.draft_sampler.listener is not None and corrected.confidence is not None:
            self.draft_sampler.listener.trusting(corrected.confidence)
        return corrected, probs

    def _chosen_captured(self, inputs: Sequence[Tensor]) -> Corrected | None:
        """Return the head's choices by a captured pass, or None if there is none; draws are not captured.

        A head that runs slot by slot has some ten short operations per slot.
        """
        graphs, sampler = self.graph_cache, self.draft_sampler
        if graphs is None or not graphs.captures_small or sampler.draws or sampler.listener is not None:
            return None
        key = ("correct", *(value.shape[1:] for value in inputs))
        if (results := graphs.replay(key, self._steady_correction, ANY, *inputs)) is None:
            return None
        tokens, *confidence = (result.clone() for result in results)
        return Corrected(tokens, *confidence)

    def _steady_correction(self, _num_places: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        assert self.corrector is not None
        corrected, _ = self.corrector.correct(inputs, self.slots, self.embedding)
        return (corrected.tokens,) if corrected.confidence is None else (corrected.tokens, corrected.confidence)

    def block_logits(self) -> Tensor:
        """Return the logits [B, num_predicted, Vd] of the tokens that the block predicts."""
        return self._read_block() if self.steps == 1 else self._in_steps()

    def _in_steps(self) -> Tensor:
        """Return the logits of `block_logits`, from several denoising steps.

        After each pass the most confident tokens are fixed, an equal share per step, and the others predicted again; a
        slot keeps the logits that it was fixed with. Drafts are trained for one step, on an anchor and masks alone
        (paper, section 4.2); the paper leaves open whether more steps help.
        """
        self.block[:, 1:] = self.config.mask_token_id
        logits = self._read_block()
        fixed = torch.zeros(logits.shape[:2], dtype=torch.bool, device=self.device)
        for step in range(1, self.steps):
            best, ids = logits.max(dim=-1)
            sureness = (best - logits.logsumexp(dim=-1)).masked_fill_(fixed, torch.inf)
            fixed.scatter_(1, sureness.topk(self.num_predicted * step // self.steps).indices, True)
            written = torch.where(fixed, self.draft.target_ids(ids), self.config.mask_token_id)
            self.block[:, 1:] = written[:, : self.block_size - 1]
            logits = torch.where(fixed[..., None], logits, self._read_block())
        return logits

    def _read_block(self) -> Tensor:
        """Return the logits [B, num_predicted, Vd] of one pass over the block as it is."""
        if (results := self.replayed(self._steady, self.starts, self.block)) is not None:
            (hidden,) = results
        else:
            # The block is written behind the context, over any stale context there.
            self.cache.place(self.starts, self.block_size)
            hidden = self._through(self.block)
        self.hidden = hidden
        return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [B, num_predicted, Vd] for a pass's output [B, N, H]."""
        logits: Tensor = self.config.body.logits(self.head(hidden[:, self.slots]))
        return logits

    def _steady(self, num_places: int, block: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
        """Run `_through`, placed by tensors alone, so that it can be captured."""
        self.cache.place_at(starts, self.block_size, num_places)
        return (self._through(block),)

    def _through(self, block: Tensor) -> Tensor:
        """Read the block [B, N] where it was placed; return the last layer's normed output [B, N, H]."""
        tables = rotations(self.rotary, self.cache)
        embedded = self.draft.embed_block(block, self.embedding)
        return self.network.forward(embedded, tables, self._seen(), self.cache)

    def _seen(self) -> Mapping[str, Seen | BlockView]:
        """Return the view or mask of the block just placed for each kind of layer, by the names of their views."""
        if self.network.reads_views:
            return self.views
        if self.by_lengths:
            return dict.fromkeys(self.views, placed_lengths(self.cache, whole_block=True))
        return {name: block_mask(self.cache, self.columns, view) for name, view in self.views.items()}


class AutoregressiveDrafter(DFlashDrafter):
    """Drafts token by token, each from a pass over the token before it (DFlash-AR; paper, table 9)."""

    @property
    def is_steady(self) -> bool:
        return False

    def propose(self) -> Draft:
        probs: list[Tensor | None] = []
        tokens = [self.block[:, :1]]
        for step in range(self.num_drafts):
            self.cache.place([start + step for start in self.starts], 1)
            logits = self.config.body.logits(self.head(self._through(tokens[-1])))
            drafted, drawn_from = self.draft_sampler.sample(logits, first=step)
            tokens.append(drafted)
            probs.append(drawn_from)
        return Draft(torch.cat(tokens[1:], dim=1), probs=joined(probs))


def raw_rows(embedding: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a lookup of an embedding's rows as stored: some targets' own modules scale them (Gemma)."""
    if type(embedding) is nn.Embedding or not isinstance(getattr(embedding, "weight", None), Tensor):
        return embedding
    weight: Tensor = embedding.weight  # type: ignore[assignment]
    return lambda tokens: torch.embedding(weight, tokens)


class AdaptiveDrafter(DFlashDrafter):
    """Base of drafters that submit only as much of a draft as pays (`engine/adaptive.py`).

    `adaptive` learns from the number of tokens that each round accepted. All arguments go to the next base.
    """

    margin = 0.0
    """Share by which a wider draft may seem slower than the best width and still be preferred."""

    may_be_none = False
    """Whether a round may verify nothing of its draft."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        lags = self.device.type != "cpu"
        self.adaptive = AdaptiveLength(self.num_drafts, lags=lags, margin=self.margin, may_be_none=self.may_be_none)

    def begin(self, num_rows: int, capacity: int) -> None:
        super().begin(num_rows, capacity)
        self.adaptive.begin(num_rows)

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        if committed.is_prompt:
            self.adaptive.add_rows(committed.rows)
        else:
            self.adaptive.learn(committed.counts)


class CutDFlashDrafter(DFlashDrafter):
    """Verifies a row's draft up to its first token whose own confidence is below the threshold, as DeepSpec does.

    That may be no token. A confidence depends on the tokens before, and never on the token itself, so drawn tokens
    still follow their q.

    On a CPU the target reads no more than the longest row's part. On a GPU the host would have to wait for this width,
    a second time per round, for a shorter pass that takes hardly less time: there the target reads the whole block, and
    nothing behind a row's cut is accepted.
    """

    reads_confidence = True

    def __init__(self, *args: Any, threshold: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.threshold = threshold

    def begin(self, num_rows: int, capacity: int) -> None:
        super().begin(num_rows, capacity)
        self.alive = [False] * num_rows

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        for row, count in zip(committed.rows, committed.counts, strict=True):
            self.alive[row] = count > 0 and committed.anchor is not None

    def propose(self) -> Draft:
        corrected, probs = self.draft_tokens(self.block_logits())
        assert corrected.confidence is not None
        sure = (corrected.confidence >= self.threshold).cumprod(dim=1).sum(dim=1)
        if self.device.type != "cpu":
            return verified_in_part(corrected.tokens, probs, corrected.tokens.shape[1], sure)
        lengths = [length * alive for length, alive in zip(sure.tolist(), self.alive, strict=True)]
        return verified_in_part(corrected.tokens, probs, max(lengths), lengths)


class AutoCutDFlashDrafter(AdaptiveDrafter):
    """Verifies as much of a draft as pays, by the product of the confidences; that may be no token.

    All rows share one width.
    """

    may_be_none = True
    reads_confidence = True

    def propose(self) -> Draft:
        self.adaptive.start()
        corrected, probs = self.draft_tokens(self.block_logits())
        assert corrected.confidence is not None
        width = self.adaptive.choose(corrected.confidence.log().cumsum(dim=-1))
        return verified_in_part(corrected.tokens, probs, width)


def verified_in_part(
    tokens: Tensor, probs: Tensor | None, width: int, lengths: Sequence[int] | Tensor | None = None
) -> Draft:
    """Return a draft of tokens [B, N], with q [B, N, V]; at most the first `width` tokens are verified."""
    probs = None if probs is None else probs[:, :width]
    return Draft(tokens[:, :width], probs=probs, lengths=lengths, drafted=tokens)


class AutoDFlashDrafter(AdaptiveDrafter):
    """Drafts the whole block, and submits as much of it as pays.

    The pass itself stays as wide as the draft was trained: a narrower one predicts worse and costs hardly less. The
    width depends on the draft's probabilities alone, never on a token drawn from them: tokens selected by their own
    value would no longer follow the draft's distribution. Which random numbers a draw uses does depend on the width, so
    under the rule `rejection` an answer is not reproducible from its seed.
    """

    margin = 0.02

    def propose(self) -> Draft:
        self.adaptive.start()
        logits = self.block_logits()
        corrected, probs = self.draft_tokens(logits)
        surest = logits.log_softmax(dim=-1).amax(dim=-1)
        width = self.adaptive.choose(surest.cumsum(dim=-1))
        return Draft(corrected.tokens[:, :width], probs=None if probs is None else probs[:, :width])
