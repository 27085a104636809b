"""The tiny model and its task: addition, on a CPU, with nothing to download.

Knows nothing of the other wings. Begin with `model`.
"""
