"""Sequence groups: their states, queues, generated tokens, and beam search."""
