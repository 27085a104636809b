"""One module for each command of `grpo-ext`; `arguments` holds their options, and `cli` dispatches.

May know everything below. Begin with `cli`, then the command you came for.
"""
