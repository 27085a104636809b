"""Rewards: columns in, one float per completion out, None where a completion cannot be scored.

May know registry and errors. Begin with `protocol`, then `composition` and `runtime` (who scores what).
"""
