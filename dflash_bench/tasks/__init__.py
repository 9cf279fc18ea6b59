"""Which prompts are there, and is an answer right?

This is the only room that runs code written by a model, and it does so in a sandbox.
"""
