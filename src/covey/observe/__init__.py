"""What a run leaves behind and how it is watched: run folder, observers, curves, statistics, doctor."""

from covey.functions import from_stub

__all__, __getattr__ = from_stub(__name__, __file__)
