"""The packaged environments, one a module.

May know the protocol of environments, rewards, registry. Begin with `guess`.
"""
