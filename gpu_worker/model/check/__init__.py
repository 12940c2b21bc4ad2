"""The check at load, which decides whether a model is served: it compares outputs with those of
the model's own code.
"""
