"""One forward pass of a target or a draft: by transformers, or by our own kernels' order of work."""
