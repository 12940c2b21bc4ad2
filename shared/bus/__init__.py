"""Append-only logs and keys that expire: the interface, on Redis and in memory."""
