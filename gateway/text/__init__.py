"""Tokens and text: the tokenizer and its vocabulary, text that appears token by token, and where
stop strings cut it.
"""
