"""What a model can do: avg@k, pass@k, maj@k with intervals over prompts, of a recipe's data and of `eval_sets`.

May know rollout and what is below, and is handed the trainer. Begin with `estimators`, then `evaluate`.
"""
