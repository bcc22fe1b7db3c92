"""Helpers of all other folders: options and errors of commands, files, texts, secrets in URLs."""
