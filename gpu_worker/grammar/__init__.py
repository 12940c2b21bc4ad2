"""Structured output: which tokens a sequence with a grammar may choose next."""
