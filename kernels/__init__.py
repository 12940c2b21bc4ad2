"""Paged attention and the other operations of a model's layers, for CPUs and GPUs.

Nothing here imports services or messages.
"""
