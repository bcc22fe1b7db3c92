"""Evaluation: predictions, metrics, reports, comparisons."""
