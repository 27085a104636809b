"""Rewards: columns in, one float per completion out, None where a completion cannot be scored.

May know config (launch, specs), objective, registry, errors. Begin with `protocol`, then `composition`.
"""
