"""All settings of a run: a file for each section or two, put together in `whole.py`, read and explained by `text.py`.

    from covey.config import GRPOConfig

Its names are loaded when they are first used, so that a room may import its own section without the rest.
"""

from covey.functions import from_stub

__all__, __getattr__ = from_stub(__name__, __file__)
