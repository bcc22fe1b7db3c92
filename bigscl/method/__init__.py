"""The method: losses, heatmaps through views, running averages, expected positives, schedules."""
