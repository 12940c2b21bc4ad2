"""Load on running services over HTTP: latencies, throughput, overload, slow readers, and the parts
of a step's time.
"""
