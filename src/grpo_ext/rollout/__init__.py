"""Completions: sampled by transformers (prompts run once per group) or by vLLM; dynamic sampling; engines for turns.

May know packing, config, objective, registry, errors. Begin with `transformers_engine` or `vllm.generation`.
"""
