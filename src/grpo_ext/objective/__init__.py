"""The mathematics, in torch only: no TRL, no transformers, no accelerate.

May know registry and errors. Begin with `losses`, the table of losses; `objective` computes one row of it.
"""
