"""The base of all CPU kernels: arguments, entry points, threads, vector instructions and captured
graphs.
"""
