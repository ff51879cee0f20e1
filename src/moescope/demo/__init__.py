"""demo: the shipped model, its recipe, and a planted checkpoint of known structure."""
