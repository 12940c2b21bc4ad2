"""Processes of services: spawned, supervised, restarted, stopped, and ended with the launcher."""
