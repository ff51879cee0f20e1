"""What the weights alone say: decompositions, alignment, its nulls and tests, subspaces, ambiguity."""
