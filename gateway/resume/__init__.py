"""Streams that any gateway can continue: ids of events and streams, what a client already has, the
look-up of requests, and the endpoint.
"""
