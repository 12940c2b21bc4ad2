"""A Redis server for one machine: finding or starting it, its data folder, and whether it can be
used.
"""
