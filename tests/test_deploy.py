"""What stands in `deploy/`, docs/scale.md and docs/configure.md: manifests, scripts that run, settings that exist."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import covey
from covey import GRPOConfig
from covey.observe.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
MANIFEST, SLURM = ROOT / "deploy" / "kuberay-rayjob.yaml", ROOT / "deploy" / "slurm.sh"


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


TEXT, NUMBER, SWITCH = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
AMOUNTS = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^\d+(m|Mi|Gi)?$"}}
MOUNT = closed(["name", "mountPath"], name=TEXT, mountPath={"type": "string", "pattern": "^/"}, readOnly=SWITCH)
PORT = closed(["containerPort"], containerPort={"type": "integer", "minimum": 1, "maximum": 65535}, name=TEXT)
CONTAINER = closed(
    ["name", "image"], name=TEXT, image=TEXT, ports={"type": "array", "items": PORT},
    resources=closed([], requests=AMOUNTS, limits=AMOUNTS), volumeMounts={"type": "array", "items": MOUNT},
)  # fmt: skip
VOLUME = closed(
    ["name"], name=TEXT, persistentVolumeClaim=closed(["claimName"], claimName=TEXT, readOnly=SWITCH),
    configMap=closed(["name"], name=TEXT), emptyDir=closed([], medium={"enum": ["", "Memory"]}, sizeLimit=TEXT),
)  # fmt: skip
CONTAINERS = {"type": "array", "items": CONTAINER, "minItems": 1}
SPEC = closed(["containers"], containers=CONTAINERS, volumes={"type": "array", "items": VOLUME})
POD = closed(["spec"], metadata={"type": "object"}, spec=SPEC)
# The fields of KubeRay's RayJobSpec, RayClusterSpec, HeadGroupSpec and WorkerGroupSpec (ray.io/v1) that are used here,
# with the types that they have there; a field of another name is a mistake.
WORKERS = closed(
    ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"], groupName=TEXT, replicas=NUMBER,
    minReplicas=NUMBER, maxReplicas=NUMBER, rayStartParams=TEXTS, template=POD,
)  # fmt: skip
CLUSTER = closed(
    ["headGroupSpec"], rayVersion=TEXT, workerGroupSpecs={"type": "array", "items": WORKERS},
    headGroupSpec=closed(["rayStartParams", "template"], rayStartParams=TEXTS, template=POD),
)  # fmt: skip
JOB = closed(
    ["entrypoint", "rayClusterSpec"], entrypoint=TEXT, backoffLimit=NUMBER, shutdownAfterJobFinishes=SWITCH,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    ttlSecondsAfterFinished=NUMBER, rayClusterSpec=CLUSTER,
)  # fmt: skip
RAY_JOB = closed(
    ["apiVersion", "kind", "metadata", "spec"], apiVersion={"const": "ray.io/v1"}, kind={"const": "RayJob"},
    metadata=closed(["name"], name=TEXT), spec=JOB,
)  # fmt: skip


@pytest.fixture(scope="module")
def documents() -> list[Any]:
    return list(pytest.importorskip("yaml").safe_load_all(MANIFEST.read_text()))


def test_the_manifest_has_kuberays_shape(documents: list[Any]) -> None:
    recipe, job = documents
    assert (recipe["apiVersion"], recipe["kind"]) == ("v1", "ConfigMap")
    assert [error.message for error in Draft202012Validator(RAY_JOB).iter_errors(job)] == []
    assert [*Draft202012Validator(RAY_JOB).iter_errors(job | {"spec": job["spec"] | {"entrypoints": ""}})]


def test_the_manifest_agrees_with_itself(documents: list[Any]) -> None:
    recipe, job = documents
    cluster = job["spec"]["rayClusterSpec"]
    workers = cluster["workerGroupSpecs"][0]
    pods = [cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]]
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1  # the same versions everywhere
    assert pods[0]["containers"][0]["image"].endswith(f":{covey.__version__}")
    for pod in pods:
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
        assert [v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v] == [recipe["metadata"]["name"]]
    config = GRPOConfig(**tomllib.loads(recipe["data"]["recipe.toml"]))
    assert config.distributed.samplers == workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    # what starts it, as a shell reads it: the recipe is where the volume is mounted, and a second try goes on
    shell = shlex.split(job["spec"]["entrypoint"])
    assert (shell[:2], subprocess.run(["sh", "-n", "-c", shell[2]], timeout=30).returncode) == (["sh", "-c"], 0)
    assert "covey train /recipe/recipe.toml run.output_dir=/covey/runs/first" in shell[2]
    assert "covey resume /covey/runs/first" in shell[2]


FAKES = {
    "scontrol": 'test "$1 $2 $3" = "show hostnames one[1-2]" && printf "127.0.0.1\\nsecond\\n"',
    # Slurm's own options go first; the rest is the command of each task
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; echo "$@" > "$FAKES/command"; exec "$@"',
    "torchrun": 'exec "$PYTHON" -m torch.distributed.run "$@"',
}


@pytest.fixture
def slurm(tmp_path: Path) -> Callable[..., Any]:
    """Runs the script with programs that stand in for Slurm's."""
    for name, body in FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = {"JOB_ID": "4711", "JOB_NODELIST": "one[1-2]", "JOB_NUM_NODES": 1, "GPUS_ON_NODE": 1, "CPUS_PER_TASK": 1}
    env = os.environ | {f"SLURM_{name}": str(value) for name, value in job.items()}
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FAKES": str(tmp_path), "PYTHON": sys.executable}
    options = {"env": env, "capture_output": True, "text": True, "timeout": 280, "cwd": tmp_path}
    return lambda *arguments: subprocess.run(["bash", SLURM, *arguments], **options)


@pytest.mark.slow
def test_the_slurm_script_trains_and_goes_on(slurm: Any, recipe_folder: Path, tmp_path: Path) -> None:
    for _ in range(2):  # a job that is requeued is the same command again
        done = slurm(recipe_folder / "recipe.toml", f"run.output_dir={tmp_path / 'run'}", "schedule.max_steps=2")
        assert done.returncode == 0, done.stderr[-2000:]
    assert RunFolder.read(tmp_path / "run").read_metrics()[-1]["step"] == 2
    command = (tmp_path / "command").read_text().split()
    assert command[:5] == ["torchrun", "--nnodes", "1", "--nproc-per-node", "1"]
    assert command[command.index("--rdzv-endpoint") + 1] == "127.0.0.1:30111"


def test_the_slurm_script_says_how_it_is_used(slurm: Any) -> None:
    done = slurm()
    assert (done.returncode, "usage: sbatch" in done.stderr) == (2, True)
    checker = shutil.which("shellcheck")
    if checker is not None:
        assert subprocess.run([checker, SLURM], timeout=60).returncode == 0


@pytest.mark.parametrize(("page", "least"), [("scale.md", 15), ("configure.md", 3)])
def test_the_commands_of_a_page_name_settings_that_exist(page: str, least: int) -> None:
    text = (ROOT / "docs" / page).read_text()
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).replace("\\\n", " ")
    sections, found = GRPOConfig().to_dict(), 0
    for line in blocks.splitlines():
        for word in re.findall(r"(?:^|[\s'])([a-z_]+\.[a-z_]+)=", line.partition("#")[0]):
            section, _, name = word.partition(".")
            assert name in sections[section], word
            found += 1
    assert found >= least
    for path in re.findall(r"\]\(\.\./([^)]+)\)|`(deploy/[^`]+)`", text):
        assert (ROOT / (path[0] or path[1])).exists(), path


def test_the_recipes_of_the_page_are_read(tmp_path: Path) -> None:
    from covey.training.schedule import Elapsed
    from covey.training.setup import phase_plan, run_length

    blocks = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "configure.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 4
    for block in blocks:
        (tmp_path / "recipe.toml").write_text(block)
        config = GRPOConfig.from_toml(tmp_path / "recipe.toml")
        assert run_length(config, phase_plan(config), num_prompts=100).rates(phase_plan(config).at(Elapsed()), 0)
