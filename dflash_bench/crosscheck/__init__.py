"""Is it the weights or the engine? The same prompts at a live server and in our engine, with known causes emulated."""
