"""How do servers answer? Decoding elsewhere, over HTTP: one file a dialect, and nothing but clocks and counts of ours.

It knows neither models nor engines. What a server does not tell is left out, with the reason, and never guessed.
"""
