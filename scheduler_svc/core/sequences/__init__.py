"""Sequence groups: their states, the queues they stand in, their generated tokens, and beam
search.
"""
