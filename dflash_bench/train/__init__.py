"""How are drafts made: corpus, responses of the target, losses, and the recipe of nano?

Every stage is seeded and continues where it was interrupted.
"""
