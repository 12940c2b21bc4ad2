"""A model's forward pass captured as one graph of kernels and replayed on CPUs, as a CUDA graph is
on a GPU.
"""
