"""One training step from an installed wheel: `python tests/wheel_step.py`, run by `make wheel` outside the repository.

Everything but the model is the installed package's; it fails where the wheel lacks a file or a dependency.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "pytorch"))
from tiny_models import tiny_model, tiny_tokenizer

import covey

RECIPE = """
model = { model = "MODEL", lora_r = 2 }
data = { task = "arithmetic:kinds=compare,digits=1,num_train=8,num_eval=4", prompts_per_step = 2 }
sampling = { num_generations = 2, max_completion_length = 4 }
schedule = { max_steps = 1 }
"""

if __name__ == "__main__":
    assert "site-packages" in str(covey.__file__), f"covey is not installed from a wheel: {covey.__file__}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_model("llama").save_pretrained(folder / "model")
        tiny_tokenizer().save_pretrained(folder / "model")
        (folder / "recipe.toml").write_text(RECIPE.replace("MODEL", str(folder / "model")))
        command = [sys.executable, "-m", "covey", "train", "recipe.toml", "run.output_dir=run"]
        subprocess.run(command, cwd=folder, check=True)
        assert (folder / "run" / "adapter" / "adapter_model.safetensors").is_file()
        assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) >= 1
