"""From logits to tokens: the distribution that transformers draws from, and numbers that belong to a request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import kstest
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import GenerationConfig, GenerationMixin

from dflash_bench.core.types import Settings
from dflash_bench.engine.sampling import (
    PURPOSES,
    Sampler,
    Sampling,
    _nucleus,
    inverse_cdf,
    penalised,
    probabilities,
    uniform,
)
from helpers.each import each
from helpers.toy import follows

CPU = torch.device("cpu")
VOCAB = 60

FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 5},
    "top-k above the vocabulary": {"top_k": 1000},
    "top-p": {"top_p": 0.6},
    "top-p of almost nothing": {"top_p": 1e-6},
    "min-p": {"min_p": 0.3},
    "min-p 1": {"min_p": 1.0},
    "repetition penalty": {"repetition_penalty": 1.4},
    "repetition reward": {"repetition_penalty": 0.8},
    "all": {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
}


def random_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed))


def of_transformers(config: dict[str, Any]) -> LogitsProcessorList:
    """The processors that generate() would assemble, in its own order."""
    whole = GenerationConfig(do_sample=True, **config)

    class Model(GenerationMixin):
        class config:  # noqa: N801
            is_encoder_decoder = False

    made: LogitsProcessorList = Model()._get_logits_processor(whole, input_ids_seq_length=9)
    return made


@each("name", FILTERS)
def test_tokens_are_drawn_from_what_transformers_makes_of_the_logits(name: str) -> None:
    """Every filter by itself, and all of them in the order of transformers."""
    sampling = Sampling(**{"temperature": 1.0, **FILTERS[name]})
    logits, text = random_logits(40), torch.randint(VOCAB, (40, 9), generator=torch.Generator().manual_seed(1))
    logits[0, 3:9] = logits[0, 3]  # ties
    expected = torch.softmax(of_transformers(FILTERS[name])(text, logits.clone()), dim=-1)
    seen = torch.zeros(40, VOCAB, dtype=torch.bool).scatter_(1, text, True)
    given = probabilities(penalised(logits, seen, sampling.repetition_penalty), sampling)
    assert torch.allclose(given, expected, atol=1e-7)
    assert torch.equal(given > 0, expected > 0)


@each("dtype", [torch.float32, torch.float64])
def test_of_equally_likely_tokens_the_first_are_dropped(dtype: torch.dtype) -> None:
    """Eight of an eighth each, of which a nucleus of 0.6 keeps five; numpy sorts float32, torch everything else."""
    logits = torch.full((2, 8), 1.5, dtype=dtype)
    logits[1, 2], logits[1, 5] = 9.0, -torch.inf
    kept = (_nucleus(logits, 0.6) > -torch.inf).tolist()
    assert kept == [[False] * 3 + [True] * 5, [False] * 2 + [True] + [False] * 5]


def test_the_order_of_transformers_is_penalty_temperature_top_k_top_p_min_p() -> None:
    order = [type(processor) for processor in of_transformers(FILTERS["all"])]
    assert order == [
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        MinPLogitsWarper,
    ]


def test_each_filter_changes_the_distribution_and_the_defaults_do_not() -> None:
    logits = random_logits(4)
    plain = torch.softmax(logits, dim=-1)
    assert torch.equal(probabilities(logits, Sampling(1.0)), plain)
    for name, options in FILTERS.items():
        changed = probabilities(logits, Sampling(**{"temperature": 1.0, **options}))
        without_effect = "above" in name or "repetition" in name
        assert torch.allclose(changed, plain) == without_effect, name


def test_a_place_is_filtered_by_itself_whatever_stands_beside_it() -> None:
    logits, sampling = random_logits(3, 5), Sampling(**FILTERS["all"])
    together = probabilities(logits, sampling)
    for b in range(3):
        for i in range(5):
            assert torch.equal(together[b, i], probabilities(logits[b, i], sampling))


def test_temperature_sharpens_and_zero_is_greedy() -> None:
    logits = torch.tensor([1.0, 2.0, 0.0])
    assert Sampling(0.0).greedy and not Sampling(0.1).greedy
    p = [probabilities(logits, Sampling(temperature))[1] for temperature in (0.5, 1.0, 2.0)]
    assert p[0] > p[1] > p[2]
    assert probabilities(logits.half(), Sampling(1.0)).dtype == torch.float32


def test_the_settings_of_a_cell_are_those_of_its_sampling() -> None:
    settings = Settings(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.2, thinking=True)
    assert Sampling.of(settings, 7) == Sampling(0.5, 7, 3, 0.9, 0.1, 1.2)
    assert Sampling.of(Settings()) == Sampling()


def test_inverse_cdf_draws_from_the_distribution() -> None:
    p = torch.tensor([0.1, 0.0, 0.45, 0.25, 0.2, 0.0])
    numbers = torch.rand(20_000, generator=torch.Generator().manual_seed(3))
    assert follows(inverse_cdf(p.expand(20_000, -1), numbers), p)


def test_inverse_cdf_never_gives_an_impossible_token_at_the_ends_of_the_interval() -> None:
    p = torch.tensor([0.0, 0.3, 0.7, 0.0])
    ends = torch.tensor([0.0, 1 - 2**-24])
    assert inverse_cdf(p.expand(2, -1), ends).tolist() == [1, 2]
    unnormalised = torch.tensor([0.0, 3e-7, 7e-7, 0.0])
    assert inverse_cdf(unnormalised.expand(2, -1), ends).tolist() == [1, 2]


# The sampler of a batch.


def sampler(sampling: Sampling, seeds: tuple[int, ...] = (5,), num_places: int = 20) -> Sampler:
    made = Sampler(sampling, len(seeds), num_places, CPU)
    made.begin([[1, 2, 3]] * len(seeds), seeds, VOCAB)
    return made


def test_a_greedy_sampler_takes_the_largest_logit() -> None:
    logits = torch.tensor([[[1.0, 3.0, 2.0], [5.0, 0.0, 0.0]]])
    greedy = sampler(Sampling())
    assert greedy.places(2) is None
    assert greedy.choose(logits, None).tolist() == [[1, 0]]


def test_the_same_place_draws_the_same_token_whatever_stands_beside_it() -> None:
    logits = random_logits(1, 6)
    drawing = sampler(Sampling(1.0))
    together = drawing.choose(logits, torch.arange(6)[None])[0].tolist()
    alone = [drawing.choose(logits[:, i : i + 1], torch.tensor([[i]])).item() for i in range(6)]
    assert together == alone
    assert len(set(together)) > 1


def test_a_rows_numbers_belong_to_its_seed_not_to_its_slot_or_to_how_many_there_are() -> None:
    places = torch.arange(20)[None]
    one, three = sampler(Sampling(1.0), (7,)), sampler(Sampling(1.0), (9, 8, 7), 90)
    for purpose in PURPOSES:
        assert torch.equal(one.numbers(purpose, places)[0], three.numbers(purpose, places.expand(3, -1))[2])


def test_places_go_on_from_what_was_emitted_and_down_a_tree_by_depth() -> None:
    drawing = sampler(Sampling(1.0), (1, 2))
    drawing.emitted([4, 9])
    chain, tree = drawing.places(3), drawing.places(4, torch.tensor([[-1, -1, 1]] * 2))
    assert chain is not None and chain.tolist() == [[4, 5, 6], [9, 10, 11]]
    assert tree is not None and tree.tolist() == [[4, 5, 5, 6], [9, 10, 10, 11]]


def test_numbers_are_uniform_and_differ_by_seed_and_purpose() -> None:
    streams = [uniform(seed, purpose, 2000) for seed in (1, 2, 2**32 + 1) for purpose in PURPOSES]
    for i, stream in enumerate(streams):
        assert kstest(stream.numpy(), "uniform").pvalue > 1e-3
        assert stream.min() >= 0 and stream.max() < 1
        for other in streams[:i]:
            assert abs(torch.corrcoef(torch.stack([stream, other]))[0, 1]) < 0.1
    # Across requests with seeds that follow on each other, too.
    first = torch.stack([uniform(seed, "draw", 3) for seed in range(3000)])
    assert kstest(first[:, 0].numpy(), "uniform").pvalue > 1e-3
    assert abs(torch.corrcoef(torch.stack([first[1:, 0], first[:-1, 0]]))[0, 1]) < 0.06


def test_any_seed_is_a_seed() -> None:
    for seed in (0, 2**31, 2**62, 10**30, -1):
        assert uniform(seed, "draw", 4).shape == (4,)


# The repetition penalty, along chains and trees.


def by_text(logits: torch.Tensor, text: list[int], penalty: float) -> torch.Tensor:
    processed: torch.Tensor = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([text]), logits[None])[0]
    return processed


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_a_place_in_a_block_is_penalised_for_its_own_text(penalty: float) -> None:
    prompts = [[1, 2, 3], [4, 5, 4, 6, 7]]
    drawing = Sampler(Sampling(repetition_penalty=penalty), 2, 20, CPU)
    drawing.begin(prompts, [0, 0], VOCAB)
    first = torch.tensor([[10], [11]])
    drawing.commit(first, torch.tensor([0, 0]))
    # Row 0 keeps two drafted tokens and a third, row 1 none and another; the rest was never said.
    drawing.commit(torch.tensor([[20, 21, 22, 50], [30, 51, 52, 53]]), torch.tensor([2, 0]))
    said = [[*prompts[0], 10, 20, 21, 22], [*prompts[1], 11, 30]]
    logits, block = random_logits(2, 4), torch.tensor([[22, 40, 41, 42], [30, 43, 44, 43]])
    along_chain = drawing.penalise(logits, block)
    parents = torch.tensor([[-1, -1, 1], [-1, 0, 0]])
    along_tree = drawing.penalise(logits, block, parents)
    above = {0: {0: [], 1: [40], 2: [41], 3: [41, 42]}, 1: {0: [], 1: [43], 2: [43, 44], 3: [43, 43]}}
    for b in range(2):
        for i in range(4):
            before = [*said[b], *block[b, 1 : i + 1].tolist()]
            assert torch.equal(along_chain[b, i], by_text(logits[b, i], before, penalty))
            assert torch.equal(along_tree[b, i], by_text(logits[b, i], [*said[b], *above[b][i]], penalty))
            assert torch.equal(drawing.penalise(logits)[b, i], by_text(logits[b, i], said[b], penalty))


def test_without_a_penalty_logits_are_left_alone() -> None:
    logits = random_logits(1, 2).half()
    assert sampler(Sampling(1.0)).penalise(logits, torch.tensor([[1, 2]])) is logits
