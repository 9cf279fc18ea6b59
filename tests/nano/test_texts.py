"""Nano's training texts: what its tokenizer, the chat template and packing make of the corpus."""

from itertools import islice

import pytest

from dflash_bench.training.masks import causal
from nano.answers import prompts
from nano.data import Sample, corpus_text, encode, pack, training_tasks, turns_of
from nano.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(corpus_text(1, 2000))


def test_numbers_are_split_into_digits_and_text_survives(tokenizer):
    text = "Ada has 1234 apples.\n```python\n    return x + 12\n```"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    digits = [tokenizer.decode([i]) for i in ids if any(c.isdigit() for c in tokenizer.decode([i]))]
    assert digits == list("123412")


def test_training_text_is_what_the_chat_template_renders(tokenizer):
    task = next(task for task in training_tasks(3) if task.suite == "mt_bench")
    first, second = turns_of(task)
    chat = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": task.answers[0]},
        {"role": "user", "content": second},
    ]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    sample = encode(task, tokenizer)[1]
    assert tokenizer.decode(sample.ids) == prompt + task.answers[1] + "<|im_end|>"
    answer = [i for i, weight in zip(sample.ids, sample.weights, strict=True) if weight == 1.0]
    assert tokenizer.decode(answer) == task.answers[0] + "<|im_end|>" + task.answers[1] + "<|im_end|>"


def test_every_conversation_is_a_prompt_and_then_one_whole_answer(tokenizer):
    found = list(islice(prompts(3, tokenizer, 256), 200))
    for item in found:
        prompt, answer = (
            tokenizer.decode(item.ids[: item.prompt_length]),
            tokenizer.decode(item.ids[item.prompt_length :]),
        )
        assert prompt.endswith(("<think>\n\n</think>\n\n", "<|im_start|>assistant\n"))
        assert answer.endswith("<|im_end|>") and answer.count("<|im_end|>") == 1
    # Both turns of a chat are there, the first without the second.
    turns = [tokenizer.decode(item.ids).count("<|im_start|>user") for item in found]
    firsts = [i for i, n in enumerate(turns[1:]) if n == 2 and turns[i] == 1]
    assert turns.count(2) == len(firsts) > 20


def test_packed_samples_never_see_each_other():
    samples = [Sample([1] * n, [1.0] * n) for n in (5, 4, 6, 3, 9)]
    batch = pack(iter(samples), num_rows=2, length=10, pad=0)
    assert batch.document.tolist() == [[0] * 5 + [1] * 4 + [-1], [0] * 6 + [1] * 3 + [-1]]
    assert batch.position[0].tolist()[:9] == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    visible = causal(batch)[0]
    assert visible[6].tolist() == [False] * 5 + [True, True] + [False] * 3
