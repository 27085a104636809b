"""One module for each command of `grpo-ext`; `cli` only dispatches.

May know everything below. Begin with `cli`, then the command you came for.
"""
