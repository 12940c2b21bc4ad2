"""Linear layers on CPUs whose weights stay packed in 8 or 4 bits and are widened in registers."""
