"""Load on running services over HTTP: latencies, throughput, overload, slow readers, and where the
time of a step goes.
"""
