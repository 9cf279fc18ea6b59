"""Which prompts are there, and is an answer to one right?

Code that a model wrote runs here, in a cage, and nowhere else.
"""
