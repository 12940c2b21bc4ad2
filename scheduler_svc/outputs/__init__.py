"""What the scheduler keeps of the outputs log, and of the prompts beside it."""
