"""The gate that a build can fail on: baselines of expected values, and the checks of runs against them."""
