"""The page in a browser, and what it costs the server."""
