"""A run, or several, as one HTML file that needs no network: what was run, curves, evaluations, completions.

May know the files that trainer and evaluation write, errors and what is below. Begin with `page`, then `reading`.
"""
