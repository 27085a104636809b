"""Processes that score rewards, so that no reward can hang or end a run.

May know the catalogue of rewards, in the worker program only. Begin with `pool`.
"""
