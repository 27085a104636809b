"""What TRL's vLLM path lacks: weight transfer without NCCL, a sampler on a CPU, recovery, and a check for drift.

`generation` is what the trainer uses; `client`, `gloo` and `buckets` carry weights to a server, `engine` and `plugin`
run inside it, `serve` starts it and `server` asks it what it is; `drift` compares sampler and trainer.
"""
