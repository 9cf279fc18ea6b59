"""The draft networks, one file each, built from shared layers."""
