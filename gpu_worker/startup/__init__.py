"""What happens before a worker serves: imports ahead of time, building its parts, measuring memory
and speeds, warming up.
"""
