"""The Triton kernels on a GPU, compared with other ways to the same results."""
