"""How is nano made: its corpus, tokenizer and target, and all its drafts, from nothing?"""
