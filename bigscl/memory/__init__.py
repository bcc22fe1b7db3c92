"""Scores and heatmaps of every training image: looked up, updated, committed and resumed."""
