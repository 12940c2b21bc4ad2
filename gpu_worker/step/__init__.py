"""One step from its plan to its outcome: inputs, forward pass, overlap with the step before, CUDA
graphs.
"""
