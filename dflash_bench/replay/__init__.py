"""Replays runs with other lengths, cuts, trees, controllers and loads, without a model."""
