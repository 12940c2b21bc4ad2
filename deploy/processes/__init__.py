"""Processes of services: spawned, supervised, restarted, stopped, ended with the launcher."""
