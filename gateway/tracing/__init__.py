"""Distributed tracing: trace contexts of calls (W3C), the phases of their requests, and spans over
OTLP.
"""
