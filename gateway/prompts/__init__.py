"""Turns clients' texts and conversations into prompt tokens: chat templates, control tokens, prompt
lengths, and the threads that do this work.
"""
