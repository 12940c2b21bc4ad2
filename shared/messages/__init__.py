"""All messages in logs and keys."""
