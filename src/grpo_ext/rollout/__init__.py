"""Completions: sampled by transformers (prompts run once per group) or by vLLM; dynamic sampling; environments' turns.

May know packing, environments, config, objective, errors. Begin with `transformers_engine` or `vllm.generation`.
"""
