"""Training on top of the engine: a small GPT on a text, from settings to a kept run."""
