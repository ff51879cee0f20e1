"""Distances between experts: neuron matching, relative L2, polar factors, and the chance level of each."""
