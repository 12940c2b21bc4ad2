"""GGUF files: their place, their header and the tokenizer in it."""
