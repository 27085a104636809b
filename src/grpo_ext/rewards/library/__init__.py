"""Scoring functions: columns in, one float per completion out.

May know the protocol of rewards, registry, errors. Begin with `functions`.
"""
