"""The life of requests: admission to the log, states, takeover by other clients, endings, and what
is remembered of them.
"""
