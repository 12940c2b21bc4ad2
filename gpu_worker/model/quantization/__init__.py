"""Linear layers whose weights are in 8 or 4 bits."""
