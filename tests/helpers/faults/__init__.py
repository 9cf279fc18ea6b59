"""Faults planted in the engine, in rules and around the engine, and the matrix that runs them."""
