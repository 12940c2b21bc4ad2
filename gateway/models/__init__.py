"""The models that a gateway serves: what it reads of their files, and the table of them by name."""
