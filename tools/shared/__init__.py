"""Shared by verbs and the page: opening stores, passes over shards, samples, tables, questions."""
