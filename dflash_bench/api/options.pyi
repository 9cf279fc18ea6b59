# For type checkers, written by docs/generate.py: the options of `dflash-bench run` by their names.
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

class Options(TypedDict, total=False):
    prompts: str | Path
    prompt_column: str
    answer_column: str
    every_answer: bool
    score: str
    data: str | Path
    prompt_style: str
    skip: int
    balance: str
    budget: str
    thinking: str
    date: str
    context: int | Sequence[int | None] | None
    target: str | Path
    drafts: Mapping[str, str | Path]
    trust_remote_code: bool
    servers: Mapping[str, str]
    dialect: str
    served_model: str
    api_key_env: str
    timeout: float
    env_proxy: bool
    launch: str
    launch_with: str
    launch_args: str
    rate: float | Sequence[float]
    clients: int
    max_new_tokens: int
    temperature: float | Sequence[float]
    top_k: int | Sequence[int]
    top_p: float | Sequence[float]
    min_p: float | Sequence[float]
    repetition_penalty: float | Sequence[float]
    concurrency: int | Sequence[int]
    slo: str
    seed: int
    block_size: int | str
    draft_steps: int | str
    repeats: int
    audit: str
    shard: str
    unsafe_code: bool
    over: Mapping[str, Iterable[object]]
    one_at_a_time: bool
    record: str
    headroom: int
    energy: bool
    json_schema: str | Path
    prefix_reuse: bool
    device: str
    device_map: str
    dtype: str
    attention: str
    engine: str
    kernels: str
    graph: str
    compile: str
    quantize: str
    tensor_parallel: int
    threads: int
    workers: int
    ray_address: str
