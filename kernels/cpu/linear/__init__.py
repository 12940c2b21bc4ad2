"""Linear layers on CPUs over packed weights: calls, kernels, their arguments and entry points."""
