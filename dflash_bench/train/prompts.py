"""The user messages of a task, rendered by the suites' own templates."""

from __future__ import annotations

from dflash_bench.train.corpus.task import Task

_MATH = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def turns_of(task: Task) -> tuple[str, ...]:
    row = task.row
    if task.suite == "gsm8k":
        return (row["question"] + _MATH,)
    if task.suite in ("math500", "aime"):
        return (row["problem"] + _MATH,)
    if task.suite == "humaneval":
        return (f"Complete this Python function. Answer with the whole function in one code block.\n```python\n{row['prompt']}```",)
    if task.suite == "mbpp":
        tests = "\n".join(row["test_list"])
        return (f"{row['prompt']}\nAnswer with one Python function in a code block. It must pass these tests:\n{tests}",)
    return tuple(row["prompt"])
