"""The check at load that decides whether a model is served: its outputs against those of the
model's own code.
"""
