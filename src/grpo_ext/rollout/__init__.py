"""Completions: by transformers (prompts run once per group), by vLLM, with groups without a signal drawn anew.

May know packing, config, objective, errors. Begin with `transformers_engine` or `vllm.generation`.
"""
