"""A GPU without a card: its memory and streams, traced passes, and attention by lengths."""
