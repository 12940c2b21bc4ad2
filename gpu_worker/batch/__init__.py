"""The resident sequences: how plans change them, and which rows a step computes. Independent of
models and devices.
"""
