"""Answers: their schemas, the serializers of OpenAI's formats, and sending them as a stream or in
one piece.
"""
