"""Shared by all rooms: types, methods, options, files, the terminal, the machine. No torch."""
