"""Distances between experts: neuron matching, relative L2, polar factors, and what chance gives of each."""
