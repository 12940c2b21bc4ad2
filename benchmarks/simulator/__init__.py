"""The scheduler core on a virtual clock: commands, workloads, and systems that serve them."""
