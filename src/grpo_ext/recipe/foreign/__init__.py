"""Configurations of other projects: recognised, read, and turned into a recipe with every key accounted for.

May import recipe's parts, files and launching, and what recipe may import. Start with `projects`, then a table.
"""
