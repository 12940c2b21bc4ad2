"""The gateway's side of one engine: messages to the scheduler, and events for requests out of the
outputs log.
"""
