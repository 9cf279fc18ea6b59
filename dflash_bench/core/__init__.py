"""Shared by all packages: types, methods, options, files, the terminal, the machine. No torch."""
