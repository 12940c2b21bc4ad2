"""What all CPU kernels share: arguments, entry points, threads, vector instructions, captured
graphs.
"""
