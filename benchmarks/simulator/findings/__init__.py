"""What a run on the virtual clock has shown: latencies, use of memory, the highest sustainable
rate.
"""
