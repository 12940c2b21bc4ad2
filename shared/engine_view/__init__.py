"""The state of an engine as its logs show it: blocks, requests, steps. Pure, for many readers."""
