"""How each server program is started: one file a program, and an entry in `launching.PROGRAMS`."""
