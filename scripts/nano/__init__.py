"""Build nano from scratch: corpus, tokenizer, target and drafts."""
