"""HTTP in, Server-Sent Events out: validates requests, tokenizes prompts, submits them to an
engine and streams its tokens as text.
"""
