"""Whole steps of the worker on a GPU, as a share of what the device allows, and compared with
transformers.
"""
