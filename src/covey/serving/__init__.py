"""Sampling on an inference server, with versions of the weights that cannot be mistaken.

Names are loaded when they are asked for: the client needs no server, and reading a config needs neither.
"""

from covey.functions import from_stub

__all__, __getattr__ = from_stub(__name__, __file__)
