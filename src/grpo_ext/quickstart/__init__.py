"""A tiny language model that learns two-digit addition by GRPO in minutes on a laptop CPU, with nothing to download."""
