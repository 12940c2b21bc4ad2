"""Tokens and text: the tokenizer and its vocabulary, incremental detokenization, stop strings, and
the text of a choice.
"""
