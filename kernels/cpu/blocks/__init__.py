"""Moves of whole KV blocks on CPUs."""
