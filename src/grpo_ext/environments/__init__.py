"""Environments: conversations and tools that a model interacts with, in contained processes, each episode by itself.

May know config, rewards (workers, code, text), objective, registry, errors. Begin with `protocol`, then `loop`.
"""
