"""Explains what happened to one request, from its engine's logs or from a recording."""
