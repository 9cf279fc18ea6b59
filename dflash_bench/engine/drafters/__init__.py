"""Drafters propose the tokens of a round. One file per method; the loop verifies whatever they propose."""
