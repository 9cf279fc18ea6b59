"""Measurements: each file declares one, whole; `core.measurement` is the interface that all others know.

Their options are part of the command line, so at the top of a file stands only what is light and known to all: `core`
and `runner.rules`. Functions import the rest.
"""
