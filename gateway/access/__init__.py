"""What a caller may do and how much of it: API keys, priorities, networks, and limits on calls
that are in progress.
"""
