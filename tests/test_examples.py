"""What stands in examples/: each notebook runs from a fresh kernel with a tiny model, every cell twice; the script."""

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model, tiny_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for the prompts, whose letters are tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    for part in (tiny_model("llama", max_position_embeddings=2048), tiny_tokenizer()):
        part.save_pretrained(folder)
    return folder


# Of Jupyter's libraries, which tell of their own changes to come and close sockets late.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["first_steps", "gsm8k_from_trl"])
def test_a_notebook(name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_algorithm_on_a_page(model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.ipynb")) == ["first_steps", "gsm8k_from_trl"]
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
