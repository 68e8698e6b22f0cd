"""The files in ``launch/``: they parse, start the job by ``ddp-nanguard run``, and restart nothing that it stopped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

LAUNCH = Path(__file__).parents[2] / "launch"
FAULT_CODE = 65
FAKE = """#!{python}
import os, sys
print(os.path.basename(sys.argv[0]), *sys.argv[1:])
if sys.argv[1:2] == ["run"] or os.path.basename(sys.argv[0]) == "srun":
    sys.exit({code})
"""


def _fakes(directory: Path, code: int, *names: str) -> str:
    """A PATH on which these programs say how they were called, and what starts a job returns the code."""
    for name in names:
        (directory / name).write_text(FAKE.format(python=sys.executable, code=code))
        (directory / name).chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


def _called(script: str, path: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": path, **variables}
    command = ["bash", str(LAUNCH / script), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=20, check=False)


@pytest.mark.parametrize("script", ["train.sh", "slurm.sbatch"])
def test_scripts_are_bash(script: str) -> None:
    subprocess.run(["bash", "-n", str(LAUNCH / script)], check=True, timeout=20)


@pytest.mark.parametrize("code", [0, 1, FAULT_CODE])
def test_one_machine_ends_with_the_code_of_the_job_and_lists_dumps_after_a_fault(code: int, tmp_path: Path) -> None:
    path = _fakes(tmp_path, code, "ddp-nanguard")
    ended = _called("train.sh", path, "4", "train.py", "--lr", "1e-3", NANGUARD_DUMP_DIR="/dumps")
    job = "ddp-nanguard run -- torchrun --standalone --nproc-per-node 4 --max-restarts 0 train.py --lr 1e-3"
    listed = ["ddp-nanguard list /dumps"] if code == FAULT_CODE else []
    assert (ended.returncode, ended.stdout.splitlines()) == (code, [job, *listed]), ended.stderr


def test_slurm_runs_one_supervised_agent_per_node_and_hands_the_code_on(tmp_path: Path) -> None:
    path = _fakes(tmp_path, FAULT_CODE, "srun", "scontrol")
    ended = _called(
        "slurm.sbatch",
        path,
        "train.py",
        SLURM_SUBMIT_DIR="/home",
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="node[1-2]",
        SLURM_NNODES="2",
        SLURM_GPUS_ON_NODE="8",
    )
    assert ended.returncode == FAULT_CODE, ended.stderr
    (line,) = ended.stdout.splitlines()
    assert line.startswith("srun --kill-on-bad-exit=0 ddp-nanguard run -- torchrun --nnodes 2 --nproc-per-node 8")
    assert line.endswith(" train.py") and "--max-restarts 0" in line
    directives = re.findall(r"^#SBATCH (\S+)", (LAUNCH / "slurm.sbatch").read_text(), re.MULTILINE)
    assert {"--ntasks-per-node=1", "--no-requeue"} <= set(directives)


def test_kubernetes_fails_the_job_on_the_exit_code_of_a_fault() -> None:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    # what the API server refuses otherwise
    assert set(spec) <= {"completions", "parallelism", "completionMode", "backoffLimit", "podFailurePolicy", "template"}
    assert pod["restartPolicy"] == "Never" and spec["completionMode"] == "Indexed"
    (container,) = pod["containers"]
    fails, ignores = spec["podFailurePolicy"]["rules"]
    on_codes = {"containerName": container["name"], "operator": "In", "values": [FAULT_CODE]}
    assert fails == {"action": "FailJob", "onExitCodes": on_codes}
    assert ignores == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert container["command"] == ["ddp-nanguard", "run", "--", "torchrun"]
    _require_nodes_that_find_each_other(service, job, container)


def _require_nodes_that_find_each_other(service: Any, job: Any, container: Any) -> None:
    spec, name = job["spec"], job["metadata"]["name"]
    assert all(isinstance(word, str) for word in [*container["args"], *(each["value"] for each in container["env"])])
    options = dict(word.removeprefix("--").split("=") for word in container["args"] if word.startswith("--"))
    assert int(options["nnodes"]) == spec["completions"] == spec["parallelism"]
    assert options["max-restarts"] == "0"
    subdomain = spec["template"]["spec"]["subdomain"]
    assert options["rdzv-endpoint"].startswith(f"{name}-0.{subdomain}:") and service["metadata"]["name"] == subdomain
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}
    volumes = {each["name"] for each in spec["template"]["spec"]["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes
    assert int(options["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
