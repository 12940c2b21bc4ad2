"""The model: download, loading, its attention, and the kernels that its layers run with."""
