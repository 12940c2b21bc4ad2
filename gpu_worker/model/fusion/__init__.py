"""Fused layers for CPUs and GPUs in the place of a loaded model's own."""
