"""A run on disk: its folder, its Parquet parts, the frame they are read into, and the check that it is complete."""
