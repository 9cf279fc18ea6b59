"""Which answers does a run on disk hold, and is it whole?

Its folder, its Parquet parts, and the frame that they are read into.
"""
