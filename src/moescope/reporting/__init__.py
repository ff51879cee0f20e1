"""Tables and figures into words and one HTML file. Needs no torch."""
