"""YAML and command line to one checked `Recipe`.

May know data, rewards, rollout (whose settings it checks), config and what is below. Begin with `parsing.load_recipe`.
"""
