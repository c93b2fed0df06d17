"""Settings as an editor and a type checker see them: COVEY_WRITE_DOCS=1 writes `src/covey/config/flat.pyi`."""

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

import covey
from covey.algorithms.losses import function_name, loss_name
from covey.config import GRPOConfig
from covey.config.names import FIELDS, OPTIONS, SECTIONS, SYNONYMS
from covey.config.section import PathText, Section, Texts
from fakes import slow

SOURCE = Path(covey.__file__).parent
FILE = SOURCE / "config" / "flat.pyi"

HEAD = '''"""GRPOConfig's flat names for type checkers and editors. Generated from the sections; do not edit.

COVEY_WRITE_DOCS=1 pytest tests/test_config_types.py      # writes it
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

'''
MORE = {"scale_rewards": "bool", "report_to": 'Literal["tensorboard", "wandb", "trackio", "mlflow", "none"] | None'}
"""Accepted by a function before the section's own check, which no annotation tells."""
FUNCTIONS = {loss_name, function_name}
CONVERTED = {getattr(one.__metadata__[-1], "func", None): more for one, more in ((PathText, "Path"), (Texts, "str"))}


def written(annotation: Any, *, given: bool) -> list[str]:
    """The alternatives of a type as a stub has them: of what is given, or of what is read."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return written(inner[0], given=given) + (accepted(inner[1:]) if given else [])
    if origin in (Union, types.UnionType):
        return [text for each in inner for text in written(each, given=given)]
    if origin is Literal:
        return [f"Literal[{', '.join(json.dumps(each) for each in inner)}]"]
    if origin is tuple:
        item = " | ".join(written(inner[0], given=given))
        return [f"list[{item}]", f"tuple[{item}, ...]"] if given else [f"tuple[{item}, ...]"]
    if origin is dict:
        key, value = (" | ".join(written(each, given=given)) for each in inner)
        return [f"Mapping[{key}, {value}]" if given else f"dict[{key}, {value}]"]
    if inspect.isclass(annotation) and issubclass(annotation, Section) and given:
        return [annotation.__name__, "Mapping[str, Any]"]
    return ["None" if annotation is types.NoneType else annotation.__name__]


def accepted(metadata: tuple[Any, ...]) -> list[str]:
    functions = [getattr(one, "func", None) for one in metadata]
    taken = ["Callable[..., Any]"] if FUNCTIONS & set(functions) else []
    return taken + [CONVERTED[each] for each in functions if each in CONVERTED]


def type_of(name: str, field: FieldInfo, *, given: bool) -> str:
    parts = written(field.annotation, given=given)
    if given:
        parts += accepted(tuple(field.metadata)) + ([MORE[name]] if name in MORE else [])
        parts += ["None"] * (field.default_factory is dict and "Literal" not in parts[0])
    parts = list(dict.fromkeys(parts))
    return " | ".join(sorted(parts, key=lambda part: part == "None"))


def stub() -> str:
    fields = {name: SECTIONS[section].model_fields[name] for name, section in FIELDS.items()}
    taken = {name: type_of(name, field, given=True) for name, field in fields.items()}
    for name, section in SECTIONS.items():
        own = f"{section.__name__} | Mapping[str, Any]"
        taken[name] = f"{own} | {taken[name]}" if name in taken else own
    taken |= {name: taken[field] for name, field in SYNONYMS.items() if "." not in name}
    taken |= {name: "float | None" if "threshold" in name else "bool" for name in OPTIONS}
    lines = ["class Settings(TypedDict, total=False):"]
    lines += ['    """Keyword arguments of `GRPOConfig` and of its `replace`."""', ""]
    lines += [f"    {name}: {taken[name]}" for name in taken]
    lines += ["", "class Flat:", '    """Fields that are read without the name of their section."""', ""]
    for name, field in fields.items():
        if name not in SECTIONS:
            read = type_of(name, field, given=False)
            meaning = textwrap.indent(textwrap.fill(f'"""{field.description}"""', 114), 4 * " ")
            lines += [f"    {name}: Final[{read}]", meaning]
    kinds = Section.__subclasses__()
    named = {*kinds, *(more for each in kinds for more in each.__subclasses__())} - {GRPOConfig}
    own = [each for each in named if any(re.search(rf"\b{each.__name__}\b", line) for line in lines)]
    text = HEAD + "\n".join([*sorted(f"from {each.__module__} import {each.__name__}" for each in own), "", *lines, ""])
    for how in (["check", "--fix", "--select", "I,D209"], ["format"]):
        command = [sys.executable, "-m", "ruff", *how, "--quiet", "--stdin-filename", FILE, "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return text


def test_the_stub_says_what_the_sections_say() -> None:
    wanted = stub()
    if os.environ.get("COVEY_WRITE_DOCS"):
        FILE.write_text(wanted)
    assert FILE.read_text() == wanted, "write it anew: COVEY_WRITE_DOCS=1 pytest tests/test_config_types.py"


RIGHT = """
from pathlib import Path
from typing import Any
from covey import GRPOConfig
def loss(step: Any) -> Any: ...
rest: dict[str, Any] = {"lora_r": 8}
config = GRPOConfig(Path("runs/x"), max_steps=10, learning_rate=1e-3, kl_coef=0, sampling={"top_k": 8}, **rest)
config = config.replace(model=Path("m"), loss_type=loss, stop_strings="x", phases=[{"steps": 3}], report_to="wandb")
rate: float = config.learning_rate + config.optim.learning_rate
names: tuple[str, ...] = config.functions
"""
WRONG = """
from covey import GRPOConfig
config = GRPOConfig(max_steps="ten", learning_rat=1e-3)
config.learning_rat
config.max_steps = 4
config.replace(bta=0.1)
text: str = config.max_steps
"""
SAID = [
    (3, 'Unexpected keyword argument "learning_rat" for "GRPOConfig"; did you mean "learning_rate"?'),
    (3, 'Argument "max_steps" to "GRPOConfig" has incompatible type "str"; expected "int"'),
    (4, '"GRPOConfig" has no attribute "learning_rat"'),
    (5, 'Cannot assign to final attribute "max_steps"'),
    (6, 'Unexpected keyword argument "bta" for "replace" of "GRPOConfig"; did you mean "beta"?'),
    (7, 'Incompatible types in assignment (expression has type "int", variable has type "str")'),
]
RIGHT_TRL = """
from covey.trl import GRPOConfig
args = GRPOConfig("out", max_steps=10, learning_rate=1e-3, use_vllm=True)
"""
WRONG_TRL = """
from covey.trl import GRPOConfig
args = GRPOConfig("out", max_steps="ten")
args = GRPOConfig("out", learning_rat=1e-3)
"""
SAID_TRL = [(3, SAID[1][1]), (4, SAID[0][1])]
OTHERS = "torch.*,transformers.*,peft.*,numpy.*,covey.training.*,covey.pytorch.*,covey.rollout.*"


@pytest.mark.parametrize(
    ("right", "wrong", "said", "skipped"),
    [slow(RIGHT, WRONG, SAID, OTHERS), slow(RIGHT_TRL, WRONG_TRL, SAID_TRL, "torch.*")],
    ids=["covey", "covey.trl"],
)
def test_mypy_finds_wrong_names_and_types(right: str, wrong: str, said: Any, skipped: str, tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(right)
    (tmp_path / "wrong.py").write_text(wrong)
    ini = f"[mypy]\nfollow_imports = silent\nmypy_path = {SOURCE.parent}\n[mypy-{skipped}]\nfollow_imports = skip\n"
    (tmp_path / "mypy.ini").write_text(ini)
    command = [sys.executable, "-m", "mypy", "--hide-error-codes", "right.py", "wrong.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = re.findall(r"^wrong\.py:(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    assert [(int(line), text) for line, text in found] == said, done.stdout + done.stderr
    assert "right.py" not in done.stdout


def test_a_notebook_completes_flat_names() -> None:
    """IPython reads a call's keyword arguments from its signature, and attributes from `dir`."""
    assert {*FIELDS, *SECTIONS} == set(inspect.signature(GRPOConfig).parameters)
    assert {"learning_rate", "optim", "replace"} < set(dir(GRPOConfig()))
