"""Which prompts there are, and whether an answer to one is right.

Answers "what is asked, and was the answer correct?"; code that a model wrote runs here, in a cage, and nowhere else.
"""
