"""Our own experiments, a file each: its runs, and the page in `results/` that they make."""
