"""Compare: what changed between two checkpoints or two runs."""
