"""Rollouts: those of transformers that run a prompt once for its completions, and what TRL's vLLM path lacks.

`transformers_engine` and `prompt_cache` are the former. Of the latter `generation` is what the trainer uses; `client`,
`gloo` and `buckets` carry weights to a server, `engine` and `plugin` run inside it, `serve` starts it and `server`
asks it what it is; `drift` and `drift_check` compare sampler and trainer.
"""
