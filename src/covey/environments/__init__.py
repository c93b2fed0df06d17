"""Worlds in which agents act for several turns."""

from covey.functions import from_stub

__all__, __getattr__ = from_stub(__name__, __file__)
