"""Offline commands: one file per verb behind `bigscl <verb>`."""
