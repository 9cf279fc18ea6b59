"""Decoding elsewhere, over HTTP: asking servers, timing and counting their answers. One file per kind of server.

It knows neither models nor engines. What a server does not report is left out, with the reason, and never guessed.
"""
