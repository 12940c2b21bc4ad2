"""One step's plan: the planner, prefill chunks, the draft of a plan, and the calendar of groups."""
