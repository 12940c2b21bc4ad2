"""Durations of iterations: rooflines from data sheets, or costs fitted to a recording, without a
model.
"""
