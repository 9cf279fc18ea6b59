"""A run on disk: its folder, its Parquet parts and the frame that they are read into.

Answers "which answers does this run hold, and are they whole?"; what they mean is for others to say.
"""
