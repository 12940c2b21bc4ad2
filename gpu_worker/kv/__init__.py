"""Memory for keys and values: paged and virtual pools, their sizes, mapping, premapping and
prefaulting.
"""
