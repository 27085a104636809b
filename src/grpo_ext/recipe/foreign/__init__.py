"""Configurations of other projects: recognised, read, and turned into a recipe with every key accounted for.

May know recipe's parts, files and launching, and what recipe may. Begin with `engine`, then the tables in `trl`.
"""
