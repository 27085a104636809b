"""The packaged environments, one per module.

May know the protocol of environments, rewards, registry. Begin with `guess`.
"""
