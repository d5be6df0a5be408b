"""The launch files in ``examples/cluster``: they can be read, agree with each other, and leave authentication on."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer

import alpa_lite as al
from alpa_lite.cli import main

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"

needs_yaml = pytest.mark.skipif(
    importlib.util.find_spec("yaml") is None, reason="PyYAML is not installed; it comes with Ray"
)


def resource(name):
    import yaml

    return yaml.safe_load((FOLDER / name).read_text())


def cluster_spec(name):
    found = resource(name)
    return found["spec"] if found["kind"] == "RayCluster" else found["spec"]["rayClusterSpec"]


def pods(spec):
    return [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


@needs_yaml
@pytest.mark.parametrize(("name", "kind"), [("raycluster.yaml", "RayCluster"), ("rayjob.yaml", "RayJob")])
def test_kuberay_resources(name, kind):
    found, spec = resource(name), cluster_spec(name)
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", kind)
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    (workers,) = spec["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    for pod in pods(spec):
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] and not container["securityContext"]["allowPrivilegeEscalation"]
        claimed = {v["name"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
        assert "/checkpoints" in [m["mountPath"] for m in container["volumeMounts"] if m["name"] in claimed]
        assert "TOKEN" not in str(container)  # KubeRay's Secret has it
    gpus = workers["template"]["spec"]["containers"][0]["resources"]
    assert gpus["requests"]["nvidia.com/gpu"] == gpus["limits"]["nvidia.com/gpu"]


@needs_yaml
def test_the_cluster_of_the_job_is_the_cluster_that_stays():
    assert cluster_spec("rayjob.yaml") == cluster_spec("raycluster.yaml")


@needs_yaml
def test_the_job_asks_for_what_it_gets():
    spec = resource("rayjob.yaml")["spec"]
    words = spec["entrypoint"].split()
    hosts, devices = re.fullmatch(r"(\d+)x(\d+):h100-sxm", words[words.index("--cluster") + 1]).groups()
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (workers["replicas"], limits["nvidia.com/gpu"]) == (int(hosts), devices)
    assert words[words.index("--checkpoint") + 1].startswith("/checkpoints/")
    assert words[:2] == ["alpa-lite", "run"]
    file, _, name = words[2].partition(":")
    assert f"def {name}() -> al.PlanTarget" in (ROOT / file).read_text()
    assert spec["shutdownAfterJobFinishes"] and spec["backoffLimit"] >= 1


def test_the_image():
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    install = next(line for line in lines if "pip install" in line)
    extras = re.search(r"alpa-lite\[([^\]]*)\]", install).group(1).split(",")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"cuda12", "ray", "checkpoint"} <= set(extras) <= set(known)
    users = [i for i, line in enumerate(lines) if line.startswith("USER ")]
    assert lines[users[-1]] == "USER 1000" and lines.index(install) > users[-1]
    assert "ENV RAY_AUTH_MODE=token" in lines


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_the_slurm_script():
    path = FOLDER / "slurm_ray.sh"
    subprocess.run(["bash", "-n", path], check=True, timeout=20)
    text = path.read_text()
    assert text.index("umask 077") < text.index("mktemp") < text.index("RAY_AUTH_TOKEN_PATH")
    assert 'rm -f "$token_file"' in text and "trap clean_up EXIT" in text
    assert text.count("alpa-lite run ") == 1
    assert path.stat().st_mode & 0o100


@pytest.mark.parametrize("name", ["rayjob.yaml", "slurm_ray.sh"])
def test_the_command_has_the_options_that_are_given(name):
    command = re.search(r"^ *(alpa-lite run .*(?:\n +--.*)*)", (FOLDER / name).read_text(), re.MULTILINE).group(1)
    given = set(re.findall(r"--[a-z]+", command))
    verb = typer.main.get_command(main).commands["run"]
    assert {"--executor", "--steps", "--checkpoint", "--cluster"} <= given
    assert given <= {option for parameter in verb.params for option in parameter.opts}


def test_no_file_names_a_registry_of_packages():
    for path in FOLDER.iterdir():
        if path.is_file():
            assert not re.search(r"index-url|pypi|https?://", path.read_text()), path


def test_the_page_explains_every_file():
    page = (ROOT / "docs" / "cluster.md").read_text()
    for path in FOLDER.iterdir():
        if path.is_file():
            assert f"**`{path.name}`**" in page, path.name
    named = set(re.findall(r"\bal\.(\w+)", page))
    assert named and all(hasattr(al, name) for name in named), named
