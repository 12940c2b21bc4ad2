"""Kernels for CPUs, compiled by numba: attention, linear layers, functions of elements, sampling,
moves of blocks.
"""
