"""One ALFWorld game: a household described in PDDL, its admissible commands, and what is said about them.

The rules are ALFWorld's own (`alfred.pddl`, `alfred.twl2`), the planner's library and the grammar TextWorld's.
TextWorld's own environment translates a problem four times before the first observation and parses every sentence
anew; this one translates once and remembers what it parsed, and says the same.
"""

from __future__ import annotations

import re
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import alfworld.info
import fast_downward
from alfworld.agents.utils.misc import Demangler
from textworld.envs.pddl import logic as pddl
from textworld.envs.pddl import textgen
from textworld.generator.game import EntityInfo
from textworld.logic import GameLogic, Proposition, Rule, State, Type, Variable

_GOAL = "UNKNOWN GOAL"
_GREETING = "-= Welcome to TextWorld, ALFRED! =-"
_PLAIN = re.compile(r"[^\[\]#|]*")  # a command without conditions: nothing but names is to be put in


@lru_cache(maxsize=1)
def game_logic() -> pddl.GameLogic:
    """The rules of every ALFWorld game, read once in a process.

    Also lets TextWorld remember the conditions and sentences that it parses, a few dozen, in place of parsing them each
    time, and copy what they are about without copying every name in it: together that is most of the time of a step.
    """
    Rule.parse_conjunctive_query = lru_cache(maxsize=1024)(Rule.parse_conjunctive_query)
    parse = lru_cache(maxsize=1024)(partial(textgen._parse_and_convert, rule_name="symbols"))
    textgen._parse_and_convert = lambda text, **_: deepcopy(parse(text))  # a derivation writes into its symbols
    textgen.copy_context = lambda c: {**c, "variables": dict(c["variables"]), "mapping": dict(c["mapping"])}
    domain = Path(alfworld.info.ALFRED_PDDL_PATH).read_text(encoding="utf-8")
    grammar = Path(alfworld.info.ALFRED_TWL2_PATH).read_text(encoding="utf-8")
    return pddl.GameLogic(domain=domain, grammar=grammar)


@lru_cache(maxsize=256)
def _words(template: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", template))


@dataclass(slots=True)
class Game:
    """One game that is being played."""

    goal: str
    commands: dict[str, Any]
    _state: _State
    _names: dict[str, EntityInfo]
    _said: dict[tuple[Any, ...], str]

    @classmethod
    def begin(cls, library: Any, problem: str, goal: str) -> Game:
        state = _State(library, problem, game_logic())
        names = {var.name: EntityInfo(var.name, var.type) for fact in state.facts for var in fact.arguments}
        demangler = Demangler(game_infos=names)
        for info in names.values():  # names for people, such as "drawer 3"
            info.name = demangler.demangle_alfred_name(info.id)
            info.definite, info.indefinite = "the", "a"
        game = cls(goal, {}, state, names, {})
        game._look_around()
        return game

    def introduction(self) -> str:
        """What the player sees at first."""
        text = self._derive("#intro#", {})
        return text.removeprefix(_GREETING).replace(_GOAL, self.goal).strip()

    def do(self, command: str) -> str:
        """Do one of `commands`, and say what happened. Anything else changes nothing."""
        action = self.commands.get(command)
        if action is None:
            return "Nothing happens."
        self._state.apply(action)
        said = self._derive(action.feedback_rule, action.mapping)
        self._look_around()
        return said

    @property
    def won(self) -> bool:
        """Whether the goal is reached."""
        return bool(self._state.check_goal())

    def plan(self) -> list[str]:
        """Commands that reach the goal from here; empty when the planner finds none."""
        return [str(command) for command in self._state.plan(self._names)]

    def _look_around(self) -> None:
        found: dict[str, Any] = {}
        for action in self._state.all_applicable_actions():
            found.setdefault(self._command(action), action)
        self.commands = dict(sorted(found.items()))

    def _command(self, action: Any) -> str:
        template = action.command_template
        words = _words(template)
        key = (template, *(variable for placeholder, variable in action.mapping.items() if placeholder.name in words))
        if key not in self._said:  # its conditions, where it has any, are about where the furniture stands
            if _PLAIN.fullmatch(template):
                names = {place.name: self._names[variable.name].name for place, variable in action.mapping.items()}
                self._said[key] = template.format(**names)
            else:
                self._said[key] = self._derive(template, action.mapping)
        return self._said[key]

    def _derive(self, start: str, mapping: Any) -> str:
        context = {
            "state": self._state,
            "facts": (),
            "variables": {placeholder.name: self._names[var.name] for placeholder, var in mapping.items()},
            "mapping": mapping,
            "entity_infos": self._names,
        }
        return str(self._state.logic.grammar.derive(start, context))


class _State(pddl.PddlState):  # type: ignore[misc]
    """TextWorld's state of a PDDL game. It translates the problem once; for the planner again when that is asked."""

    def __init__(self, library: Any, problem: str, logic: pddl.GameLogic) -> None:
        State.__init__(self, GameLogic())
        self.logic = self._logic = logic
        self.downward_lib, self.pddl_problem = library, problem
        self.task, self.sas = fast_downward.pddl2sas(logic.domain, problem)
        self._actions = {action.name: action for action in self.task.actions}
        for kind in self.task.types:
            with suppress(ValueError):  # another game has brought it
                logic.types.add(Type(kind.name, kind.supertype_names))
        self.name2type = {thing.name: thing.type_name for thing in self.task.objects}
        library.load_sas(self.sas.encode())
        self._can_plan = False
        self.add_facts(fact for fact in map(self._initial, self.task.init) if fact is not None)
        atoms = (pddl.Atom * library.get_state_size())()
        library.get_state(atoms)
        facts = (atom.get_fact(self.name2type) for atom in atoms)
        self.add_facts(fact for fact in facts if not fact.is_negation)

    def plan(self, names: dict[str, EntityInfo]) -> list[str]:
        if not self._can_plan:
            _, sas = fast_downward.pddl2sas(self.logic.domain, self.pddl_problem, optimize=True)
            self.downward_lib.load_sas_replan(sas.encode())
            self._can_plan = True
        return list(self.replan(names))

    def _initial(self, said: Any) -> Proposition | None:
        """A fact of the problem: a predicate, or where something is; distances and costs are not facts."""
        if isinstance(said, fast_downward.translate.pddl.conditions.Atom):
            return None if said.predicate == "=" else self._proposition(said.predicate, said.args)
        if isinstance(said, fast_downward.translate.pddl.f_expression.Assign):
            value = str(said.expression.value)
            if said.fluent.symbol != "total-cost" and not value.isdigit():
                return self._proposition(value, said.fluent.args)
        return None

    def _proposition(self, name: str, args: Any) -> Proposition:
        return Proposition(name, [Variable(arg, self.name2type[arg]) for arg in args])
