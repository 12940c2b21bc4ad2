"""A Redis server for one machine: finds or starts it, and checks its data folder and settings."""
