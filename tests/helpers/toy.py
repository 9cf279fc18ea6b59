"""A target that looks its tokens up in a table, tiny random models, and drafters that are right, wrong and mean.

The table target keeps what it reads in the engine's own cache, and what it says next depends on every token it can
see, on their order and on their positions: a cache that is rolled back wrongly, shows too much or loses a token
changes what it says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from scipy.stats import chisquare
from torch import Tensor

from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.drafter import Committed, Drafter, NoDrafter
from dflash_bench.engine.forward.native import NativeForward
from dflash_bench.engine.loop import decode
from dflash_bench.engine.masks import ancestors, causal_mask
from dflash_bench.engine.rows import HostClock, Limits, Round
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Output, Target
from dflash_bench.engine.verify import Draft
from helpers.shared import kept

NUM_STATES = 251


class TableTarget:
    """Satisfies what the loop asks of `Target`, without a network."""

    reads_in_parts = True

    def __init__(self, vocab_size: int = 23, context_length: int = 64, seed: int = 0) -> None:
        self.vocab_size, self.context_length = vocab_size, context_length
        self.device = torch.device("cpu")
        self.table = torch.randn(NUM_STATES, vocab_size, generator=torch.Generator().manual_seed(seed))
        self.taps: tuple[int, ...] = ()
        self.cache = KVCache(0, 0, self.device)

    def logits_after(self, history: Sequence[int]) -> Tensor:
        """The table's next token after these tokens, without any cache."""
        return self.table[sum(_weight(i) * (token + 1) for i, token in enumerate(history)) % NUM_STATES]

    def answer(self, prompt: Sequence[int], max_new_tokens: int, stop_ids: frozenset[int] = frozenset()) -> list[int]:
        """The greedy answer, one token after the other, by definition."""
        tokens: list[int] = []
        while len(tokens) < min(max_new_tokens, self.context_length - len(prompt)):
            tokens.append(int(self.logits_after([*prompt, *tokens]).argmax()))
            if tokens[-1] in stop_ids:
                break
        return tokens

    def tap(self, taps: Sequence[int]) -> None:
        self.taps = tuple(taps)

    def begin(self, num_rows: int, capacity: int) -> None:
        self.cache = KVCache(num_rows, capacity, self.device)

    def prefill(self, prompts: Sequence[Sequence[int]], starts: Sequence[int] | None = None, first: int = 0) -> Output:
        width = max(len(prompt) for prompt in prompts)
        block = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
        output = self.forward(block, starts or [0] * len(prompts), first=first)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts])
        return Output(output.logits[torch.arange(len(prompts)), last][:, None], output.hidden)

    def forward(self, tokens: Tensor, starts: Sequence[int], parents: Tensor | None = None, first: int = 0) -> Output:
        self.cache.place(starts, tokens.shape[1], first)
        positions = self.cache.positions
        if parents is not None:
            positions = positions[:, :1] + ancestors(parents).sum(dim=-1) - 1
        stored = self.cache.write(0, tokens[:, None, :, None], positions[:, None, :, None].contiguous())
        seen, at = (x[:, 0, None, :, 0] for x in stored)
        allowed = causal_mask(self.cache, torch.float32, parents)[:, 0] == 0
        rank = allowed.cumsum(dim=-1) - 1
        # A token at another position than the one it is read at would add to the state, and change what comes next.
        state = ((_weight(rank) * (seen + 1) + 13 * (at - rank)) * allowed).sum(dim=-1) % NUM_STATES
        hidden = torch.stack([tokens, positions.expand_as(tokens)], dim=-1).float() if self.taps else None
        return Output(self.table[state], hidden)

    def keep_path(self, starts: Sequence[int], path: Tensor) -> None:
        self.cache.keep_path(starts, path)

    def commit(self, counts: Sequence[int]) -> None:
        pass


def _weight(place: Any) -> Any:
    return (place * 31 + 7) % 97


@cache
def tiny(kind: str, **changes: Any) -> Any:
    """A random language model with 97 tokens; whoever changes it copies it first, as `shared.py` makes sure."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kept(_tiny(kind, **changes))


def _tiny(kind: str, **changes: Any) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    gpt2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
    made = {
        "qwen3": lambda: transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**{**shape, "head_dim": 8, "tie_word_embeddings": True, **changes})
        ),
        "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**shape, **changes})),
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**shape, **changes})),
        "mistral": lambda: transformers.MistralForCausalLM(
            transformers.MistralConfig(**{**shape, "sliding_window": None, **changes})
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**{**gpt2, "bos_token_id": 0, "eos_token_id": 1, **changes})
        ),
    }
    model = made[kind]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # With fresh weights a model repeats its last token; layers that outweigh the embedding say something.
            outside = any(part in name for part in ("embed", "wte", "lm_head"))
            parameter.mul_(1 if outside or parameter.ndim < 2 else 10)
    return model


def generated(model: Any, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Answer of transformers' own greedy loop."""
    out = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@dataclass
class Decoded:
    """Tokens and rounds of one call of the loop; rounds without the prefill."""

    tokens: list[list[int]]
    rounds: list[Round]

    def own(self, row: int) -> list[Round]:
        return [step for step in self.rounds if step.emitted[row] is not None]


def run(
    target: Any,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 24,
    stop_ids: frozenset[int] = frozenset(),
    sampling: Sampling | None = None,
    seeds: Sequence[int] | None = None,
) -> Decoded:
    limits = Limits(max_new_tokens, stop_ids)
    prefill, *rounds = decode(target, drafter, prompts, limits, sampling or Sampling(), HostClock(), seeds)
    tokens = [[t for step in (prefill, *rounds) for t in step.emitted[row] or ()] for row in range(len(prompts))]
    return Decoded(tokens, rounds)


def native(model: Any) -> Target:
    """The target by our own forward pass: three times as fast as transformers', to which other tests compare it."""
    return Target(model, network=NativeForward(model))


def plain(target: Target, prompts: Sequence[Sequence[int]], *args: Any, **options: Any) -> list[list[int]]:
    """Plain decoding of each prompt alone."""
    return [run(target, NoDrafter(), [prompt], *args, **options).tokens[0] for prompt in prompts]


Change = Callable[[int], int]
"""From the right token to what is proposed instead."""


class Scripted:
    """Knows the whole text of each row, and proposes from it what `change` makes of it."""

    def __init__(self, texts: Sequence[Sequence[int]], num_drafts: int, change: Change = lambda token: token) -> None:
        self.texts, self.num_drafts, self.change = texts, num_drafts, change
        self.taps: tuple[int, ...] = ()
        self.at: dict[int, tuple[int, int]] = {}
        """For each row, its text, and how much of it the target has read."""

    def begin(self, num_rows: int, capacity: int) -> None:
        pass

    def observe(self, committed: Committed) -> None:
        for row, request, start, count in zip(
            committed.rows, committed.requests, committed.starts, committed.counts, strict=True
        ):
            self.at[row] = request, start + count

    def right(self, depth: int) -> list[list[int]]:
        """The next tokens of each row after its anchor, zeros where its text is over."""
        return [
            [*text[end + 1 : end + 1 + depth], *[0] * depth][:depth]
            for text, end in ((self.texts[request], end) for _, (request, end) in sorted(self.at.items()))
        ]

    def propose(self) -> Draft:
        return Draft(torch.tensor([[self.change(token) for token in row] for row in self.right(self.num_drafts)]))


def sometimes_wrong(share_right: float, vocab_size: int, seed: int = 0) -> Change:
    generator = torch.Generator().manual_seed(seed)

    def change(token: int) -> int:
        right = torch.rand((), generator=generator).item() < share_right
        return token if right else (token + 1) % vocab_size

    return change


def changes(vocab_size: int, stop_id: int) -> dict[str, Callable[[], Change]]:
    """Every way to propose: a fresh one each time, because some draw random numbers."""
    return {
        "right": lambda: lambda token: token,
        "mostly right": lambda: sometimes_wrong(0.8, vocab_size),
        "mostly wrong": lambda: sometimes_wrong(0.3, vocab_size),
        "wrong": lambda: lambda token: (token + 1) % vocab_size,
        "right up to the stop": lambda: lambda token: 0 if token == stop_id else token,
        "always the stop": lambda: lambda token: stop_id,
        "always a spare id": lambda: lambda token: vocab_size - 1,
    }


class Tree(Scripted):
    """Proposes a tree around the right text: `shape` is chain, branching, duplicates or late."""

    def __init__(self, texts: Sequence[Sequence[int]], depth: int, shape: str, vocab_size: int) -> None:
        self.depth, self.shape, self.vocab_size = depth, shape, vocab_size
        super().__init__(texts, depth if shape == "chain" else 2 * depth)

    def propose(self) -> Draft:
        trees = [self._tree(row) for row in self.right(self.depth)]
        return Draft(torch.tensor([tokens for tokens, _ in trees]), torch.tensor([parents for _, parents in trees]))

    def _tree(self, right: list[int]) -> tuple[list[int], list[int]]:
        if self.shape == "chain":
            return right, [i - 1 for i in range(self.depth)]
        tokens, parents, at = [], [], -1
        for depth, token in enumerate(right):
            # Two children: beside the right one stands a wrong one, or the same again, before it or behind it.
            other = token if self.shape == "duplicates" else (token + 1) % self.vocab_size
            first = depth % 2 == 0 if self.shape == "late" else self.shape == "duplicates"
            tokens += [token, other] if first else [other, token]
            parents += [at, at]
            at = 2 * depth + (0 if first else 1)
            if self.shape == "duplicates" and depth == 2:
                # Nodes below the second of two equal nodes cannot be reached, and need not be.
                at += 1
        return tokens, parents


class RandomTree(Scripted):
    """Proposes other trees to each row in each round: N nodes, at most `top_k` below each, the right text among them.

    The right text goes on below its last node with probability 2/3; with top_k 1 the tree is a chain.
    """

    def __init__(
        self, texts: Sequence[Sequence[int]], num_drafts: int, top_k: int, vocab_size: int, seed: int = 0
    ) -> None:
        super().__init__(texts, num_drafts)
        self.top_k, self.vocab_size, self.random = top_k, vocab_size, random.Random(seed)

    def propose(self) -> Draft:
        trees = [self._tree(row) for row in self.right(self.num_drafts)]
        return Draft(torch.tensor([tokens for tokens, _ in trees]), torch.tensor([parents for _, parents in trees]))

    def _tree(self, right: list[int]) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        depth, tip, room = 0, -1, {-1: self.top_k}
        for node in range(self.num_drafts):
            parent = (
                tip if self.random.random() < 0.4 and room[tip] else self.random.choice([i for i in room if room[i]])
            )
            room[parent] -= 1
            room[node] = self.top_k
            goes_on = parent == tip and self.random.random() < 2 / 3
            tokens.append(right[depth] if goes_on else self.random.randrange(self.vocab_size))
            parents.append(parent)
            if goes_on:
                depth, tip = depth + 1, node
        return tokens, parents


class SampledTree(Scripted):
    """Two children, and two below the first of them; siblings are drawn without replacement, and it says so."""

    num_nodes = 4

    def __init__(self, num_rows: int, vocab_size: int, seed: int = 0) -> None:
        super().__init__([()] * num_rows, self.num_nodes)
        self.vocab_size, self.seed = vocab_size, seed

    def begin(self, num_rows: int, capacity: int) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def propose(self) -> Draft:
        drawn = [self._pair() for _ in range(2)]
        tokens = torch.cat([pair for pair, _ in drawn], dim=1)
        parents = torch.tensor([-1, -1, 0, 0]).expand_as(tokens)
        return Draft(tokens, parents, torch.cat([q for _, q in drawn], dim=1))

    def _pair(self) -> tuple[Tensor, Tensor]:
        q = torch.softmax(2 * torch.randn(len(self.texts), self.vocab_size, generator=self.generator), dim=-1)
        first = torch.multinomial(q, 1, generator=self.generator)
        rest = q.scatter(1, first, 0.0)
        rest = rest / rest.sum(dim=-1, keepdim=True)
        second = torch.multinomial(rest, 1, generator=self.generator)
        return torch.cat([first, second], dim=1), torch.stack([q, rest], dim=1)


class Sampled(Scripted):
    """Draws its drafts from random distributions of its own, and says so."""

    def __init__(self, num_rows: int, num_drafts: int, vocab_size: int, seed: int = 0) -> None:
        super().__init__([()] * num_rows, num_drafts)
        self.vocab_size, self.seed = vocab_size, seed

    def begin(self, num_rows: int, capacity: int) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def propose(self) -> Draft:
        shape = (len(self.texts), self.num_drafts, self.vocab_size)
        q = torch.softmax(2 * torch.randn(shape, generator=self.generator), dim=-1)
        tokens = torch.multinomial(q.flatten(0, 1), 1, generator=self.generator).view(shape[:2])
        return Draft(tokens, probs=q)


class Watching:
    """Passes on to another drafter, and writes down what the loop told it the target had read."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.num_drafts, self.taps = inner, inner.num_drafts, inner.taps or (0,)
        self.read: list[list[Tensor]] = []
        self.following: list[list[int]] = []
        self.anchors: list[int] = []

    def begin(self, num_rows: int, capacity: int) -> None:
        self.read, self.following = [[] for _ in range(num_rows)], [[] for _ in range(num_rows)]
        self.inner.begin(num_rows, capacity)

    def observe(self, committed: Committed) -> None:
        assert committed.hidden is not None
        for b, (start, count) in enumerate(zip(committed.starts, committed.counts, strict=True)):
            assert start == len(self.read[b])
            self.read[b] += list(committed.hidden[b, :count])
            self.following[b] += committed.tokens[b, :count].tolist()
        self.anchors = committed.anchor.tolist()
        self.inner.observe(committed)

    def propose(self) -> Draft | None:
        draft: Draft | None = self.inner.propose()
        return draft


def follows(tokens: Tensor, p: Tensor) -> bool:
    """Chi-square at one in a thousand over the tokens that p allows; any other token is a refusal at once."""
    p = p.double() / p.double().sum()
    counts, allowed = torch.bincount(tokens, minlength=len(p)), p > 0
    if counts[~allowed].any():
        return False
    expected = p[allowed] * len(tokens)
    return bool(chisquare(counts[allowed].numpy(), expected.numpy(), sum_check=False).pvalue > 1e-3)


class Letters:
    """Tokens are characters: id 0 is a space, 1 the end, then the printable ones."""

    chat_template: str | None = None
    eos_token_id = 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0 if c == " " else min(ord(c) - 31, 96) for c in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(" " if i == 0 else chr(i + 31) for i in ids)
