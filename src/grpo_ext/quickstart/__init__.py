"""A tiny language model that learns to add by GRPO, in minutes, on a laptop CPU, with nothing to download."""
