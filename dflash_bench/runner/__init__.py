"""From a request to rows: what is to be run, resolved once, then run prompt by prompt and saved.

It knows how to decode through one interface only, and judges no figure.
"""
