"""The inside of the sandbox: a supervisor builds it, and runners execute an answer's program and its tests in it.

A supervisor is started for every program, so it only imports modules that Python has loaded anyway or that load in a
few milliseconds: no dataclasses, json, subprocess or pathlib here. The caller's side is `dflash_bench.tasks.sandbox`.
"""
