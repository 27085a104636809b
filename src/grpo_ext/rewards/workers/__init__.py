"""Processes that score rewards, so that no reward can hang or end a run.

May know nothing of rewards but their protocol. Begin with `pool`.
"""
