"""Rewards that ask a model: a reward model in memory, a judge behind HTTP.

May know the protocol and the texts of rewards. Begin with `reward_model` and `remote`.
"""
