"""The results of a run on the virtual clock: latencies, use of memory, the highest sustainable
rate.
"""
