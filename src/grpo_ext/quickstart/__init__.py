"""The tiny models and their tasks, addition and a game of several turns: on a CPU, with nothing to download.

Knows nothing of the other wings. Begin with `model`.
"""
