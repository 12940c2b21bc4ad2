"""The one reader of the outputs log: entries in, typed events out, with epochs and gaps checked."""
