"""Spectral analysis of expert weights: decompositions, alignment with router rows, its nulls, subspaces."""
