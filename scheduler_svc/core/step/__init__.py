"""One step's plan: which groups compute, how much of each prompt, and when groups are due."""
