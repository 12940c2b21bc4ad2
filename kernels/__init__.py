"""Paged attention and what surrounds it, for CPUs and GPUs. Nothing here imports services or
messages.
"""
