"""The reward `code`: programs against tests, in a sandbox. THREATS.md says what it promises, and against whom.

May know the protocol of rewards and their text. Begin with `reward`, then `sandbox`.
"""
