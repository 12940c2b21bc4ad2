"""The generation behind one call: its lifecycle, what is new by choice, and the requests of its
prompts.
"""
