"""The cage's own side: a keeper that builds it, and the runner inside.

It starts anew for every program, hence only what Python has loaded anyway, or loads in a few milliseconds: no
dataclasses, json, subprocess or pathlib here. The caller's side is `dflash_bench.tasks.sandbox`.
"""
