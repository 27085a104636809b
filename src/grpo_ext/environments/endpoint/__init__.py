"""The server through which agents call the model, its dialects, and the contexts of their requests.

May know the protocol and the renderer of environments, errors and what reads files. Begin with `server`.
"""
