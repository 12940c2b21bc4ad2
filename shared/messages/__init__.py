"""Every message that stands in a log or a key."""
