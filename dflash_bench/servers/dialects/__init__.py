"""How each server is spoken to: one file a dialect, and an entry in `detection.DIALECTS`."""
