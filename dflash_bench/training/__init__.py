"""How are drafts trained: prompts, the target's answers, losses, and the loop.

Every stage is seeded and continues where it was interrupted.
"""
