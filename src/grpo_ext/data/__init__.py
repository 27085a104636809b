"""Datasets: the hub, local files and procedural tasks, prepared into `prompt`, `solution` and columns for rewards.

May know what rewards ask for, config's rules, the quickstart's task, registry and errors. Begin with `loading`, then `prepare`.
"""
