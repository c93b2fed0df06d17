"""Worlds: adapters for other interfaces, worlds by name, and from what a model says to what it does."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from worlds import answers, begun

from covey.environments import EnvironmentPool, Observation, get_world, register_world, world_names
from covey.environments.actions import match_action, parse_action, write_action
from covey.environments.adapters import Gymnasium, GymnasiumEnvironment, OpenEnv, OpenEnvEnvironment
from covey.environments.base import checked_reset, checked_step
from covey.errors import ConfigError, EpisodeError
from covey.recipes.house.house import House, HouseEnvironment
from fakes import raises

TASK = {"rooms": ["attic", "garden"], "thing": "key", "place": "garden", "uid": "x"}


def test_the_house_shows_one_room_at_a_time() -> None:
    house = HouseEnvironment()
    seen = house.reset(TASK, 0)
    assert seen.text == "Find the key. You are in the hall. There is a note on the wall. Doors: attic, garden."
    assert seen.actions == ("read note", "go attic", "go garden")
    seen, reward, done, _ = house.step("go attic")
    assert seen == Observation("You are in the attic. It is empty. A door leads back to the hall.", ("go hall",))
    assert (reward, done) == (0.0, False)
    assert house.step("take key")[3] == {"valid": False}  # it is not here
    house.step("go hall")
    seen, *_ = house.step("read note")
    assert seen.text.startswith("The note says: the key is in the garden. You are in the hall. Doors: attic")
    assert seen.actions == ("go attic", "go garden")  # it can be read once
    assert house.step("read note")[3] == {"valid": False}
    house.step("go garden")
    seen, reward, done, info = house.step("take key")
    assert (seen.text, reward, done, info) == ("You have the key.", 1.0, True, {"success": True})


def test_an_expert_needs_three_actions_everywhere() -> None:
    for task in House(rooms=5).eval_tasks()[:20]:
        house = HouseEnvironment()
        house.reset(task, 0)
        assert [house.step(house.expert_action())[2] for _ in range(3)] == [False, False, True]


def test_instances_are_seeded_and_disjoint() -> None:
    world = House(num_train=300, num_eval=50)
    assert world.eval_tasks() == House(num_train=300, num_eval=50).eval_tasks()
    assert world.train_tasks(0) == world.train_tasks(0) != world.train_tasks(1)
    held_out = {task["uid"] for task in world.eval_tasks()}
    assert len(held_out) == 50
    assert not held_out & {task["uid"] for task in world.train_tasks(3)}
    assert len(world.train_tasks(3)) == 300


def test_worlds_by_name() -> None:
    assert {"house", "gymnasium", "openenv"} <= set(world_names())
    assert get_world("house:rooms=4,max_turns=6").max_turns == 6
    for name, message in (
        ("hause", r"environment='hause': no such environment; did you mean 'house'"),
        ("house:room=3", "has no option 'room'; did you mean 'rooms'"),
        ("house:rooms=1", "rooms=1"),
    ):
        raises(ConfigError, message, get_world, name)
    register_world("mine", House)
    assert isinstance(get_world("mine"), House)


class Corridor:
    """Gymnasium's interface: walk right three times."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        self.place, self.seed = 0, seed
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.place += 1 if action == 1 else -1
        return self.place, float(self.place == 3), self.place == 3, self.place < -2, {"seed": self.seed}

    def close(self) -> None:
        self.place = -99


def test_gymnasium() -> None:
    env = GymnasiumEnvironment(Corridor(), ["left", "right"], lambda place: f"at {place}")
    assert env.reset({"seed": 7}, 0) == Observation("at 0", ("left", "right"))
    assert env.step("jump") == (Observation("at 0", ("left", "right")), 0.0, False, {"valid": False})
    end = Observation("at 3", ("left", "right"))
    assert [env.step("right") for _ in range(3)][2] == (end, 1.0, True, False, {"seed": 7})
    env.close()
    broken = GymnasiumEnvironment(Corridor(), None, str, lambda text: text + 1)
    broken.reset({}, 0)
    raises(TypeError, "can only concatenate", broken.step, "left")  # a mistake in `act` is no invalid action
    world = Gymnasium("Corridor-v0", num_train=5, num_eval=3)
    assert {t["seed"] for t in world.train_tasks(0)}.isdisjoint(t["seed"] for t in world.eval_tasks())
    raises(ConfigError, "lacks its option 'env'; write gymnasium:env=VALUE", get_world, "gymnasium")
    plain = type("Plain", (OpenEnv,), {"max_turns": 3})
    raises(ConfigError, r"Plain.max_turns=3: is no default .* max_turns: int = 3", plain, "f")


def test_openenv() -> None:
    class Client:
        def reset(self) -> Any:
            return SimpleNamespace(observation=SimpleNamespace(message="hello"), reward=None, done=False)

        def step(self, action: Any) -> Any:
            observation = SimpleNamespace(message=f"echo {action.text}")
            return SimpleNamespace(observation=observation, reward=0.5, done=True, metadata={"n": 1})

        def close(self) -> None:
            pass

    def act(text: str) -> Any:
        if not text.startswith("say "):
            raise ValueError(text)
        return SimpleNamespace(text=text.removeprefix("say "))

    env = OpenEnvEnvironment(Client(), act=act)
    assert (env.reset({}, 0).text, env.step("shout")) == ("hello", (Observation("hello"), 0.0, False, {"valid": False}))
    assert env.step("say hi") == (Observation("echo hi"), 0.5, True, {"n": 1})
    env.close()
    raises(ConfigError, "lacks its option 'factory'; write openenv:factory=VALUE", get_world, "openenv")


def test_what_is_an_observation_and_an_outcome() -> None:
    wrong: Any = (None, 3, b"x", Observation(3), Observation("x", "abc"), Observation("x", (1,)))  # type: ignore[arg-type]
    for returned in wrong:
        raises(EpisodeError, "reset returned", checked_reset, returned)
    seen = Observation("a", ("x", "y"))
    assert checked_reset(("text", {"info": 1})) == Observation("text")
    outcome = checked_step(("b", 1, True, {"k": 2}), "x", seen)
    assert (outcome.reward, outcome.success, outcome.valid, outcome.info) == (1.0, True, True, {"k": 2})
    assert not checked_step(("b", 0.0, True, {}), "z", seen).valid
    assert not checked_step(("b", 0.0, True, {}), "x", seen).success
    for reward in (float("nan"), float("inf"), "1", True, None):
        raises(EpisodeError, "finite number", checked_step, ("b", reward, False, {}), "x", seen)


def test_a_real_gymnasium_environment_in_a_process_of_its_own() -> None:
    pytest.importorskip("gymnasium")
    world = get_world("gymnasium:env=FrozenLake-v1,actions=left|down|right|up,max_turns=30")
    with EnvironmentPool(world, places=2) as pool:
        seen = begun(pool, *world.eval_tasks()[:1] * 2)
        assert seen[0] == seen[1] == Observation("0", ("left", "down", "right", "up"))
        pool.step(0, "down")
        outcome = answers(pool, 1)[0]
        assert outcome.observation.text in ("0", "1", "4")  # the ice is slippery
        assert "prob" in outcome.info
    with EnvironmentPool(get_world("gymnasium:env=NoSuchLake-v1"), places=1) as pool:
        assert "NoSuchLake" in str(begun(pool, {})[0])


ACTIONS = ("go", "go north", "go to the red door", "take key", "look")


BOOK = '{"name": "book", "arguments": {"to": "Rome", "from": "Oslo", "meta": {"seats": [1, 2]}}}'


def test_formats() -> None:
    for text, format, action in (
        ("<action>go north</action>", "tags", "go north"),
        ("I think. <action>look</action> no: <ACTION> take key </ACTION>", "tags", "take key"),
        ("go north", "tags", None),
        ("<action></action>", "tags", None),
        ("<action>fly</action>", "tags", None),
        ("\n\n  Go North. \nbecause", "text", "go north"),
        ("I will take key now", "text", "take key"),
        ("I go to the red door", "text", "go to the red door"),
        ("take key or look", "text", None),  # two of them: no decision
        ("gonorth", "text", None),
        ("", "text", None),
        ("   \n ", "text", None),
        ('{"name": "look", "arguments": "{\\"at\\": 1}"}', "call", '{"name": "look", "arguments": {"at": 1}}'),
        (f"Well. <tool_call>{BOOK}</tool_call>", "call", BOOK),
        ('{"name": "look", "parameters": {}}', "call", '{"name": "look", "arguments": {}}'),
        (f"```json\n{BOOK}\n```\n", "call", BOOK),
        (f"```\n{BOOK}```", "call", BOOK),
        (f"Well:\n```json\n{BOOK}\n```", "call", None),
        (f"```json\n{BOOK}", "call", None),
        (f"```\n{BOOK}\n```\n```\n{BOOK}\n```", "call", None),
        ('{"name": "look"', "call", None),
        (f'[{{"name": "look", "arguments": {{}}}}, {BOOK}]', "call", BOOK),
        ("[]", "call", None),
        ("[1, 2]", "call", None),
        ('{"arguments": 3}', "call", None),
        ('{"name": 3, "arguments": {}}', "call", None),
        ("[" * 100_000, "call", None),
        ("look\naround", "turn", "look"),
        ("go", "choice", "go"),
    ):
        assert parse_action(text, format, ACTIONS) == action, text[:80]  # type: ignore[arg-type]


def test_without_a_list_anything_may_be_tried_and_with_one_the_longest_name_is_meant() -> None:
    assert parse_action("<action> open the box </action>", "tags") == "open the box"
    assert parse_action("x" * 1001, "text") is None
    assert parse_action(" a\nb" * 1000, "turn") == ("a\nb" + " a\nb" * 999)
    edit = json.dumps({"name": "edit", "arguments": {"text": "x" * 2000}})
    assert parse_action(edit, "call") == edit == write_action(edit, "call")
    for said, action in (("go north!", "go north"), ("GO", "go"), ("going nowhere", None)):
        assert match_action(said, ACTIONS) == action
    assert match_action("x", ()) is None
