"""The mathematics, in torch alone: no TRL, no transformers, no accelerate.

May know registry and errors. Begin with `losses`, THE table; `objective` puts a row of it to work.
"""
