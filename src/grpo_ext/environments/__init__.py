"""Environments: what a model talks to or calls, turn after turn, contained, each attempt advancing on its own.

May know rewards (workers, sandbox), objective, registry, errors. Begin with `protocol`, then `loop`.
"""
