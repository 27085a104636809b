"""A run, or several, as one HTML file that needs no network: what was run, curves, evaluations, completions.

May know what trainer writes into a run's folder, errors and what is below. Begin with `page`, then `reading`.
"""
