"""Kernels for GPUs, in Triton: paged attention, moves of blocks, and the layers around
attention.
"""
