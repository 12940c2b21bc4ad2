"""The Files API: what batches read and write, kept in Redis in pieces.

No part of the gateway holds a whole file: bodies are written while they arrive, and contents are
read while they are sent.

    form, upload    a body of multipart/form-data becomes a file
    records, store  what Redis keeps
"""
