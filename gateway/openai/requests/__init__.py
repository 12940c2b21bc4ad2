"""Bodies of requests: their schemas, fields that are ignored, and what they ask for: sampling
parameters, beam searches, and what the answer shows.
"""
