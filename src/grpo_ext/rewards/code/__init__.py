"""The reward `code`: programs against tests, in a sandbox. SECURITY.md lists its promises and its adversary.

May know the protocol and texts of rewards. Begin with `reward`, then `sandbox`.
"""
