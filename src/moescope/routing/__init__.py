"""Routing on text: which experts each token went to, counted as the model runs, and what the counts say."""
