"""Forward passes of targets and drafts: by transformers, or by our own code."""
