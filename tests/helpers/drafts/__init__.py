"""Tiny drafts: a module for each kind."""
