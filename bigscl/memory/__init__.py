"""The memory: running averages of scores and heatmaps of every training image."""
