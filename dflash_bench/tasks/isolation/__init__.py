"""The inside of the sandbox: keepers that build cages, and in them the runners of an answer's program and of its tests.

A keeper starts anew for every program, so it only imports modules that Python has loaded anyway or that load in a few
milliseconds: no dataclasses, json, subprocess or pathlib here. The caller's side is `dflash_bench.tasks.sandbox`.
"""
