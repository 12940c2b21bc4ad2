"""The resident sequences: how plans change them, and which rows a step computes. Needs no model
and no device.
"""
