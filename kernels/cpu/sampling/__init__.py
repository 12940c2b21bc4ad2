"""Choosing tokens on CPUs: samples from logits, and the argmax of an output layer that is pruned
by quantized weights.
"""
