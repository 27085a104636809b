"""Rollouts by vLLM: client and server, weights by gloo, recovery, the drift check, and the plugin for vLLM.

May know config, errors. Begin with `generation`. `engine` and `plugin` run inside vLLM's processes.
"""
