"""Scoring functions: columns in, one float per completion out.

May know the protocol, texts and models of rewards, registry. Begin with `functions`.
"""
