"""Benchmarks of the real services, and a simulator of the scheduler."""
