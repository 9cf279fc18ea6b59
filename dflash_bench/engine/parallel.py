"""A target and its judge in several processes: what this one does with them, the others do with their parts.

Only calls that read the target are shared. Drafting, verifying and sampling stay in this process, which has the
embedding, the head and the drafts; the outputs of tapped layers are whole after each layer's sum. A call is announced
over the processes' CPUs, so a pass costs an exchange more than a pass of one process. (Shoeybi et al., Megatron-LM,
arXiv 1909.08053, section 3.)
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

TARGET, JUDGE = "target", "judge"
OF_TARGET = ("tap", "begin", "forward", "keep_path", "commit", "release")
OF_JUDGE = ("audit", "divergence")
"""The methods that read the model, or set what it reads."""


def announced(of: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method, announced to the followers before each call."""

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        with self.followers.announced(of, method.__name__, args, options):
            return method(self, *args, **options)

    return call


class ParallelTarget(Target):
    """The leader's part of a target; its passes return what the target in one process would."""

    def __init__(self, model: Any, followers: Followers) -> None:
        self.followers = followers
        super().__init__(model)


class ParallelJudge(Judge):
    followers: Followers


for name in OF_TARGET:
    setattr(ParallelTarget, name, announced(TARGET, getattr(Target, name)))
for name in OF_JUDGE:
    setattr(ParallelJudge, name, announced(JUDGE, getattr(Judge, name)))


def judge_of(source: Source, followers: Followers, max_new_tokens: int) -> ChatJudge:
    """Return the judge of a divided target, with weights of its own, which are loaded now in all processes.

    Followers load it in the same order; nothing may be announced before.
    """
    words = words_in(source)
    with followers.announced(JUDGE, "__init__", (), {"stop_ids": words.stop_ids, "max_new_tokens": max_new_tokens}):
        model = weights_in(source)
    judge = ParallelJudge(model, words.stop_ids, max_new_tokens)
    judge.followers = followers
    chat_judge = ChatJudge(lambda: model, lambda: words, max_new_tokens)
    chat_judge.judge = judge
    return chat_judge


# The side of a follower.


class Share:
    """A follower's part of target and judge, and the calls it makes on them."""

    def __init__(self, source: Source) -> None:
        self.source = source
        model = targets.load(source.folder, source.device, source.dtype, source.placement)
        self.target = Target(model)
        self.judge: Judge | None = None

    def make(self, call: parallel.Announcement) -> None:
        if call.of == JUDGE and call.method == "__init__":
            self.judge = Judge(weights_in(self.source), **call.options)
            return
        assert call.of == TARGET or self.judge is not None, "the judge is loaded first"
        owner, device = (self.target, self.target.device) if call.of == TARGET else (self.judge, None)
        args = [_placed(one, device) for one in call.args]
        getattr(owner, call.method)(*args, **{name: _placed(one, device) for name, one in call.options.items()})


def _placed(value: Any, device: torch.device | None) -> Any:
    return value.to(device) if isinstance(value, Tensor) and device is not None else value


def main() -> None:
    """Follow the leader until it ends."""
    source: Source = pickle.load(sys.stdin.buffer)
    parallel.connect()
    share = Share(source)
    while True:
        try:
            call = parallel.received()
        except RuntimeError:
            return  # the leader has ended
        share.make(call)
