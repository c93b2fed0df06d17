"""The tools of a recipe, functions in files and MCP servers: found and described before training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast, get_type_hints

from transformers.utils.chat_template_utils import get_json_schema

from covey.config.whole import GRPOConfig
from covey.errors import ConfigError
from covey.functions import load_function
from covey.rollout.learning import Sampler, TrainedPolicy
from covey.rollout.mcp import McpTools
from covey.rollout.scoring import Scorer
from covey.rollout.toolchat import ToolChat
from covey.rollout.toolplay import ToolCollector
from covey.rollout.tools import INDEX, Calls, Scene, Tool, takes_index, tool_name
from covey.rollout.turns import TurnGenerator
from covey.training import setup
from covey.types import Prompt

MCP = "mcp:"
"""How the name of an MCP server begins; a command or a URL follows."""


def make_collector(
    config: GRPOConfig,
    policy: TrainedPolicy,
    engine: Sampler,
    scorer: Scorer,
    decode: Callable[[Sequence[int]], str],
) -> ToolCollector:
    """What samples answers for which the tools of `environment.tools` may be called.

    Raises `ConfigError`: a function is not there or cannot be described, a server does not start, two tools have one
    name, or the chat template cannot write conversations with tools.
    """
    chosen = config.environment
    album, blind = setup.picture_reader(config, policy)
    how: dict[str, Any] = {"in_words": True, "album": album}
    chat = ToolChat(policy.tokenizer, policy.eos_token_ids, config.data.chat_template_kwargs or {}, **how)
    functions = [load_function(name) for name in chosen.tools if not name.startswith(MCP)]
    schemas = list(map(tool_schema, functions))
    servers = [name.removeprefix(MCP).strip() for name in chosen.tools if name.startswith(MCP)]
    served = McpTools(servers, chosen.step_seconds, sees=album is not None) if servers else None
    tools: dict[str, Tool | None] = {tool_name(function): function for function in functions}
    schemas += served.schemas if served else []
    names = [schema["function"]["name"] for schema in schemas]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"environment.tools: two tools have the name {twice[0]!r}; rename or remove one")
    tools = {name: tools.get(name) for name in names}

    def scenes(prompts: Sequence[Prompt]) -> list[Scene]:
        return [Scene(prompt, tools, schemas) for prompt in prompts]

    most = min(chosen.max_conversation_tokens, engine.context_length)
    limits = chosen.model_copy(update={"max_conversation_tokens": most})
    calls, turns = Calls(scorer.runner, chosen.step_seconds, blind), cast(TurnGenerator, engine)
    return ToolCollector(turns, scorer, decode, chat, scenes, calls, limits, served=served)


def tool_schema(tool: Tool) -> dict[str, Any]:
    """The tool as chat templates show it: name, description, JSON schema of its arguments."""
    if not callable(tool):
        raise ConfigError(f"tools: {tool!r:.200} is a {type(tool).__name__}; give functions")
    try:
        return dict(get_json_schema(_without_index(tool) if takes_index(tool) else tool))
    except Exception as error:  # several kinds, none of them public
        raise ConfigError(
            f"tools: {tool_name(tool)} cannot be described to the model ({error!s:.300}); give each "
            "argument a type hint and a line below 'Args:' of its docstring"
        ) from error


def _without_index(tool: Tool) -> Tool:
    """Something with the tool's name, docstring and arguments, but `_completion_idx`."""

    def shown() -> None: ...

    signature = inspect.signature(tool)
    shown.__name__, shown.__doc__ = tool_name(tool), inspect.getdoc(tool)
    shown.__annotations__ = {name: hint for name, hint in get_type_hints(tool).items() if name != INDEX}
    kept = [parameter for name, parameter in signature.parameters.items() if name != INDEX]
    vars(shown)["__signature__"] = signature.replace(parameters=kept)
    return shown
