"""Builders shared by the tests: tiny models, trainers, recorded runs, environments and rewards that fail."""
