"""What services share: messages, the bus, settings, metrics, errors."""
