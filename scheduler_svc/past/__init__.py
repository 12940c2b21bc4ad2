"""The past of an engine: plans that are kept, and reruns of a stretch with other settings."""
