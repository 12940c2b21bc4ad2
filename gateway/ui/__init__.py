"""The page that a browser shows at ``/``: static files, which call the API as any client does."""
