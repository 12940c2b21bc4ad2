"""Reads the outputs log: turns entries into typed events, and checks epochs and gaps."""
