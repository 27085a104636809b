"""Diagnosis of a run: metrics that only a diagnosis needs, and the table of rules that find faults in a log.

May know micro-batches, advantages and one process's part of a parameter, no other part of the trainer. Begin with
`rules`, then `recording`.
"""
