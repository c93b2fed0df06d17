"""Verifiable rewards: functions and verifiers that score completions."""

from covey.functions import from_stub

__all__, __getattr__ = from_stub(__name__, __file__)
