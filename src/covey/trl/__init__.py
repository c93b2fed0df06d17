"""TRL's interface: a TRL script runs with its import line changed.

    from covey.trl import GRPOConfig, GRPOTrainer

Names, defaults and meanings are TRL 1.16's; `docs/coming-from-trl.md` lists them all.
"""

from covey.functions import from_stub, unknown_name

__all__, _found = from_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    if name in __all__:
        return _found(name)
    if name[:1].isupper() or name in ("is_conversational", "apply_chat_template", "extract_prompt"):
        more = ", and train on what it saves" if name.endswith(("Trainer", "Config")) else ""
        advice = f"covey.trl has no {name}: it has GRPO and teachers; if it is TRL's, import it from trl{more}"
        raise unknown_name(__name__, name, advice)
    raise AttributeError(f"module 'covey.trl' has no attribute {name!r}")
