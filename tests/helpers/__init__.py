"""Helpers of tests: each module stands in for one thing, or makes one kind of input."""
