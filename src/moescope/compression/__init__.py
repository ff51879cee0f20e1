"""Fewer experts: what they were seen to do, which go or join, and the checkpoint that comes of it."""
