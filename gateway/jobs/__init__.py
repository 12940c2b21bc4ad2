"""Work that outlives calls and processes.

A job is a log in Redis and an entry in a queue. One gateway at a time works on it, by a claim that
Redis enforces and a lease that shows that it is at work; any other goes on where it stopped.

    claims          the log of a job, and the work while the claim holds
    dispatcher      claims what is queued and runs nowhere
    kept_bytes      counts what an API key keeps
    kept_names      lists it
    records         messages of the queues and lists
"""
