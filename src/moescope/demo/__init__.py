"""The model that comes with moescope, its recipe, and the demo that shows it."""
