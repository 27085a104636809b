"""The packaged environments, one per module.

May know the protocol of environments, rewards, objective, registry, errors. Begin with `guess`.
"""
