"""The tiny models and their tasks, addition and a game of several turns: on a CPU, without downloads.

Knows no other wing. Begin with `model`.
"""
