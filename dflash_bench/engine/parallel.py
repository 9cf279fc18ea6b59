"""Tensor parallel execution of the target and its judge: the leader announces each call, and followers repeat it.

Only calls that read the target's layers are announced. Drafting, verification and sampling run on the leader, which has
the embedding, the head and the drafts; outputs of layers are complete on every process after the all-reduce. Each call
costs one broadcast between CPUs. (Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3.)
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from dflash_bench.engine.judge import Judge
from dflash_bench.engine.judge_weights import ChatJudge, weights_in, words_in
from dflash_bench.engine.target import Target
from dflash_bench.models import parallel, targets
from dflash_bench.models.loading import Source
from dflash_bench.models.parallel import Followers

TARGET, JUDGE, FOLLOWER = "target", "judge", "follower"
OF_TARGET = ("tap", "begin", "forward", "keep_path", "commit", "release")
OF_JUDGE = ("audit", "divergence")
"""The methods that run the model, or change what its next pass reads."""


def announced(of: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that each call is announced to the followers first."""

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        with self.followers.announced(of, method.__name__, args, options):
            return method(self, *args, **options)

    return call


class ParallelTarget(Target):
    """The leader's target: passes run on all processes and return complete outputs."""

    def __init__(self, model: Any, followers: Followers) -> None:
        self.followers = followers
        super().__init__(model)


class ParallelJudge(Judge):
    """The leader's judge."""

    followers: Followers


for name in OF_TARGET:
    setattr(ParallelTarget, name, announced(TARGET, getattr(Target, name)))
for name in OF_JUDGE:
    setattr(ParallelJudge, name, announced(JUDGE, getattr(Judge, name)))


def judge_of(source: Source, followers: Followers, max_new_tokens: int) -> ChatJudge:
    """Load the judge's own copy of the weights on all processes, and return the judge."""
    words = words_in(source)
    with followers.announced(FOLLOWER, "load_judge", (words.stop_ids, max_new_tokens), {}):
        model = weights_in(source)
    judge = ParallelJudge(model, words.stop_ids, max_new_tokens)
    judge.followers = followers
    chat_judge = ChatJudge(lambda: model, lambda: words, max_new_tokens)
    chat_judge.judge = judge
    return chat_judge


# Followers.


class Follower:
    """A follower's shard of target and judge."""

    def __init__(self, source: Source) -> None:
        self.source = source
        model = targets.load(source.folder, source.device, source.dtype, source.placement)
        self.objects: dict[str, Any] = {FOLLOWER: self, TARGET: Target(model)}
        self.device: torch.device = model.get_input_embeddings().weight.device

    def load_judge(self, stop_ids: frozenset[int], max_new_tokens: int) -> None:
        self.objects[JUDGE] = Judge(weights_in(self.source), stop_ids, max_new_tokens)

    @torch.inference_mode()
    def repeat(self, call: parallel.Announcement) -> None:
        """Make the announced call, in the leader's mode: caches made in it can only be written in it."""
        options = {name: self._placed(value) for name, value in call.options.items()}
        getattr(self.objects[call.of], call.method)(*map(self._placed, call.args), **options)

    def _placed(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, Tensor) else value


def main() -> None:
    """Repeat the leader's calls until it ends."""
    source: Source = pickle.load(sys.stdin.buffer)
    parallel.follow()
    follower = Follower(source)
    while True:
        try:
            call = parallel.received()
        except RuntimeError:
            return  # the leader has ended
        follower.repeat(call)
