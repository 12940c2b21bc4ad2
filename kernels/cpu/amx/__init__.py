"""Products of matrices by AMX tiles (Intel, from Sapphire Rapids on), and the same without AMX."""
