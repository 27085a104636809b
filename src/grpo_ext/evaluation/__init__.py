"""What a model can do: avg@k, pass@k, maj@k with intervals over prompts, of a recipe's data and of `eval_sets`.

May know trainer and what is below. Begin with `estimators`, then `evaluate`.
"""
