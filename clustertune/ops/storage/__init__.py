"""Bricks, exports, mounts and the pool of a node: what they shall be, what they are, and whether they work."""
