"""Choosing the next token: penalties, filters, Gumbel noise, argmax, log-probabilities, candidates
of beams. Parameters are declared in ``shared.sampling``.
"""
