"""The router lab: a small MoE language model that takes any router, and what trains it."""
