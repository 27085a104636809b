"""Rewards that ask a model: a reward model in memory, a judge behind HTTP.

May know config (launch), the protocol and texts of rewards, registry. Begin with `reward_model` and `remote`.
"""
