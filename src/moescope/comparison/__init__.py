"""Compare: what changed between two checkpoints, or in the routing of one text."""
