"""The scheduler core, pure: no clock, no log, no Redis. The same calls with the same arguments
give the same plans. ``policy.py`` decides which requests run, wait and are preempted.
"""
