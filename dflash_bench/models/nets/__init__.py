"""The drafts' own networks, one file each, over the layers that they share."""
