"""KV blocks: the pool, block tables, the prefix cache, pinned prefixes, and allocation of blocks
for running groups.
"""
