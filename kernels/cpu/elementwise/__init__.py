"""What is computed element by element or row by row on CPUs: normalization, rotary embeddings,
activations, sums, lookups.
"""
