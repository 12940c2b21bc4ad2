"""Penalties and the choice of tokens on GPUs."""
