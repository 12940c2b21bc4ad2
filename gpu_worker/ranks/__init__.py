"""Several workers of one engine, which hold a part of its model each (tensor parallelism)."""
