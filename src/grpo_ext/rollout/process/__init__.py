"""A process that samples for a trainer: `sampler` is the trainer's side, `child` the process's.

May know config, packing, errors, and of rollout the decoding and the weights that samplers get. Begin with `sampler`.
"""
