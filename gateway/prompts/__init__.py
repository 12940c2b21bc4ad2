"""From what clients send to prompt tokens: chat templates, control tokens, lengths, and the
threads on which this is computed.
"""
