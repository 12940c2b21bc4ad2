"""Structured output: what a request asks a text to look like becomes a grammar, compiled once here
so that the worker gets none that cannot be compiled.
"""
