"""Training of drafts: prompts, the target's answers, losses, and the loop.

Every stage is seeded and resumes where it was interrupted.
"""
