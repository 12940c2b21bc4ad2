"""Prefixes that the operator keeps in the KV cache: the file that lists them, and their requests
to the scheduler.
"""
