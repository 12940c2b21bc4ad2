"""Choosing tokens on CPUs: samples from logits, and the argmax of an output layer, pruned by bounds
from quantized weights.
"""
