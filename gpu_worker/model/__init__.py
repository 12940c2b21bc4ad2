"""The model: download, loading, its attention, and the kernels of its layers."""
