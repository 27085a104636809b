"""Diagnosis of a run: metrics that only a diagnosis needs, and the table of rules that find faults in a log.

May know micro-batches, credit and a parameter's local part, no other part of the trainer. Begin with `rules`.
"""
