"""What happened to one request, told from its engine's logs or from a recording."""
