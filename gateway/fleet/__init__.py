"""Many engines behind one gateway: the directory, routing, placements, and moved generations."""
