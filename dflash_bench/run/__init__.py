"""From a request to rows: what is to be run, resolved once, and then run.

Answers "what was asked for, and how far is it?"; knows how to decode by one interface only.
"""
