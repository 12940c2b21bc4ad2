"""Executes step plans on a model: plans in, results out."""
