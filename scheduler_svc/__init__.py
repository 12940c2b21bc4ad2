"""The scheduler as a service: logs in, plans out, one epoch after the other."""
