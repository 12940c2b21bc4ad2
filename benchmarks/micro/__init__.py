"""Benchmarks of single parts: CPU kernels, the scheduler's step, sampling, block sharing, and the
gateway's cost of a token.
"""
