"""The endpoints, and their description in OpenAPI."""
