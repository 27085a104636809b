"""What a run records for a diagnosis, and THE table of rules that name a fault by it.

May know the metrics' names, no other part of the trainer. Begin with `rules`, then `recording`.
"""
