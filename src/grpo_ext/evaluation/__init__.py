"""Evaluation of a model on a recipe's data and on `eval_sets`: avg@k, pass@k, maj@k with intervals over prompts.

May know rollout and all below it; the trainer is an argument. Begin with `estimators`, then `evaluate`.
"""
