"""Streams that any gateway can continue: ids of events and of streams, what a client already has,
and the endpoint.
"""
