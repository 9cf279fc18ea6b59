"""Servers over HTTP that answer from tables."""
