"""The Triton kernels on a GPU against other ways to the same results."""
