"""Paged attention on CPUs: decode tiles and prefill tiles, with and without dot products of bf16
pairs.
"""
