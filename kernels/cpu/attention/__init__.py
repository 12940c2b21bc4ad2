"""Paged attention on CPUs: decode tiles and prefill tiles, by elements or by dot products of
bfloat16.
"""
