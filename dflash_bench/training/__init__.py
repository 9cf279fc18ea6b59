"""How are drafts made: answers of the target, losses, the loop; and, in `nano`, a target from nothing?

Every stage is seeded and continues where it was interrupted.
"""
