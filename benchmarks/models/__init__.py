"""Models for benchmarks: folders, names, and random weights."""
