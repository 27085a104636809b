"""`GRPOExtTrainer(trl.GRPOTrainer)`: thin; each override calls super() or one function of a wing below.

May know all but commands, train and recipe. Begin with `grpo_trainer`.
"""
