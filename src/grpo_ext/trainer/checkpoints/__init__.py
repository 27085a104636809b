"""Checkpoints: what they hold, how they are written, which one a run goes on from.

May know the settings and the mathematics, no other part of the trainer. Begin with `choice`.
"""
