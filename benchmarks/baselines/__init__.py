"""Orca, FasterTransformer and vAttention, as their papers describe them, on the virtual clock."""
