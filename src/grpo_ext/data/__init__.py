"""Datasets: the hub, local files and procedural tasks, prepared into `prompt`, `solution` and columns for rewards.

May know rewards (what they ask for), config, the quickstart, registry, errors. Begin with `loading`, then `prepare`.
"""
