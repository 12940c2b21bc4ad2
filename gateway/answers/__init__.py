"""The parser of answers: the text of a choice becomes content, reasoning and calls of tools. The
result depends on the text alone, not on how it is cut into pieces, so that streams, whole answers
and resumed streams are parsed alike.
"""
