"""Figure building blocks: style, axes, palettes, maps. Needs no torch."""
