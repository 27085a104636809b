"""Checkpoints: their content, how they are written, and the choice of the one that a run resumes from.

May know the settings, the data's settings and the mathematics, no other part of the trainer. Begin with `choice`.
"""
