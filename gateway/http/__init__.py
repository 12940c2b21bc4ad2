"""HTTP: connections and their limits, bodies, errors, the application and the process that serves
it.
"""
