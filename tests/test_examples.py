"""The notebooks in examples/: each runs from a fresh kernel with a tiny model, and every cell can be run again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import tiny_model, tiny_tokenizer

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples").glob("*.ipynb"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for the prompts, whose letters are tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", max_position_embeddings=2048).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_there_are_some() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_steps", "gsm8k_from_trl"]


# Of Jupyter's libraries, which tell of their own changes to come and close sockets late.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "path",
    [NOTEBOOKS[0], *(pytest.param(path, marks=pytest.mark.slow) for path in NOTEBOOKS[1:])],
    ids=lambda path: path.stem,
)
def test_a_notebook(path: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_MODEL", str(model))
    monkeypatch.setenv("COVEY_STEPS", "1")
    monkeypatch.setenv("COVEY_OUTPUT", str(tmp_path / "out"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "save it without outputs"
    # Each code cell twice: what a reader does who changes a line.
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code" for _ in range(2)]
    nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    if path.stem == "gsm8k_from_trl":
        assert {"README.md", "adapter_config.json", "covey", "covey-1"} <= {
            p.name for p in (tmp_path / "out").iterdir()
        }
