"""Runs all services on one machine, and provides health checks and requirements for containers."""
