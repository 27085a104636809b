"""Rollouts by vLLM: its client and server, weights by gloo, recovery, drift between sampler and policy, our plug-in.

May know config, objective, errors. Begin with `generation`. `engine` and `plugin` run inside of vLLM's processes.
"""
