"""Evaluation of a model on a recipe's data and on `eval_sets`: avg@k, pass@k, maj@k with intervals over prompts.

May import the trainer, rollout and all below them. Begin with `estimators`, then `evaluate`.
"""
