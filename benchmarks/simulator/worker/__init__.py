"""How long an iteration takes: rooflines from data sheets, or costs fitted to a recording, without
a model.
"""
