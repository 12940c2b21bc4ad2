"""A rank's part of a model: which rows and columns of which weights, and how they are loaded."""
