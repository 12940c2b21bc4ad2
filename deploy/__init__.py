"""Runs all services on one machine, and what containers need."""
