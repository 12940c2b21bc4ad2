"""One part at a time: kernels on CPUs, the scheduler's step, ways of sampling, sharing of blocks,
the gateway's cost of a token.
"""
