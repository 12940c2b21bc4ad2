"""What clients ask of a response, and the chat that it becomes."""
