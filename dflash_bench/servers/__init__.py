"""Decoding on servers, over HTTP: send requests, time and count the answers. One file per kind of server.

It depends on neither models nor engines. Anything a server does not report is omitted, with the reason, never guessed.
"""
