"""`GRPOExtTrainer(trl.GRPOTrainer)`: the flow of a generation and the loss, each once; other overrides are thin.

May know all but commands, train and recipe. Begin with `grpo_trainer`.
"""
