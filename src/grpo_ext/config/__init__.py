"""`GRPOExtConfig`: TRL's `GRPOConfig` with the axes of the loss, and every rule about a setting, a module a subject.

May know objective, registry, errors, and TRL's configuration. Begin with `grpo_config`, then `checks` (all rules).
"""
