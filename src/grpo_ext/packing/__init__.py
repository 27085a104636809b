"""Many rows in one forward: what may share a prompt, the packed layout, attention, LM head, micro-batches.

May know config, objective, registry, errors. Begin with `layout`, then `policy` (where it pays).
"""
