"""From logits to tokens: the right distribution, and numbers that belong to a row and a place."""

from __future__ import annotations

import torch
from toy import follows

from dflash_bench.engine.sampling import Sampler, Sampling, inverse_cdf, probabilities

CPU = torch.device("cpu")


def test_temperature_sharpens_and_zero_is_greedy() -> None:
    logits = torch.tensor([1.0, 2.0, 0.0])
    assert Sampling(0.0).greedy and not Sampling(0.1).greedy
    assert torch.allclose(probabilities(logits, 1.0), torch.softmax(logits, dim=-1))
    assert probabilities(logits, 0.5)[1] > probabilities(logits, 1.0)[1] > probabilities(logits, 2.0)[1]
    assert probabilities(logits.half(), 1.0).dtype == torch.float32


def test_inverse_cdf_draws_from_the_distribution() -> None:
    p = torch.tensor([0.1, 0.0, 0.45, 0.25, 0.2, 0.0])
    uniform = torch.rand(20_000, generator=torch.Generator().manual_seed(3))
    assert follows(inverse_cdf(p.expand(20_000, -1), uniform), p)


def test_inverse_cdf_never_gives_an_impossible_token_at_the_ends_of_the_interval() -> None:
    p = torch.tensor([0.0, 0.3, 0.7, 0.0])
    ends = torch.tensor([0.0, 1 - 2**-24])
    assert inverse_cdf(p.expand(2, -1), ends).tolist() == [1, 2]
    unnormalised = torch.tensor([0.0, 3e-7, 7e-7, 0.0])
    assert inverse_cdf(unnormalised.expand(2, -1), ends).tolist() == [1, 2]


def test_a_greedy_sampler_takes_the_largest_logit() -> None:
    logits = torch.tensor([[[1.0, 3.0, 2.0], [5.0, 0.0, 0.0]]])
    assert Sampler(Sampling(), 1, 8, CPU).choose(logits, None).tolist() == [[1, 0]]


def test_the_same_place_draws_the_same_token_whatever_stands_beside_it() -> None:
    logits = torch.randn(1, 6, 50, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(Sampling(1.0, seed=5), 1, 10, CPU)
    together = sampler.choose(logits, torch.arange(6)[None])[0].tolist()
    alone = [sampler.choose(logits[:, i : i + 1], torch.tensor([[i]])).item() for i in range(6)]
    assert together == alone
    assert len(set(together)) > 1


def test_a_rows_numbers_do_not_depend_on_the_batch_or_on_how_many_there_are() -> None:
    one, three = Sampler(Sampling(1.0, 7), 1, 20, CPU), Sampler(Sampling(1.0, 7), 3, 90, CPU)
    assert torch.equal(one.uniform[0], three.uniform[0, :20])
    assert torch.equal(one.acceptance[0], three.acceptance[0, :20])
    assert not torch.equal(three.uniform[0], three.uniform[1])


def test_draws_and_acceptance_use_different_numbers_and_another_seed_others_again() -> None:
    first, second = Sampler(Sampling(1.0, 1), 1, 20, CPU), Sampler(Sampling(1.0, 2), 1, 20, CPU)
    assert not torch.equal(first.uniform, first.acceptance)
    assert not torch.equal(first.uniform, second.uniform)


def test_any_seed_is_a_seed() -> None:
    for seed in (0, 2**31, 2**62, 10**30, -1):
        assert Sampler(Sampling(1.0, seed), 2, 4, CPU).uniform.shape == (2, 4)
