"""Files that start a cluster for a run, checked with golden files, a RayJob schema, and stand-ins for Slurm and Ray."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

import jsonschema
import pytest
import yaml

from scripts import make_job_files  # pyright: ignore[reportAttributeAccessIssue]  scripts is not a package
from slime_like.cluster.jobs.layout import NodeLayout, node_layout
from slime_like.cluster.jobs.slurm import ADDRESS, SlurmOptions, slurm_script
from slime_like.util.deadline import Deadline
from tests.cluster.rayjob_schema import CRD_VARIABLE, RAY_JOB, published_schema

GOLDEN = Path(__file__).parent / "golden"
SLURM = ("slurm", "--gpu", "H200", "--code", "/shared/slime like", "--partition", "gpu", "--account", "a_b")
SLURM_RUN = ("+recipe=qwen3_235b_a22b", "run.dir=/shared/it's")
KUBERNETES = (
    "kubernetes",
    "--gpu",
    "H100",
    "--image",
    "registry.example/slime_like:gpu",
    "--claim",
    "shared",
    "--secret",
    "keys",
)
KUBERNETES_RUN = ("+recipe=qwen3_next_80b_a3b", "run.dir=/shared/runs/a")
NUMBER, WORD = r"[1-9]\d*", r"[\w.,/-]+"
SBATCH = {
    "job-name": WORD,
    "nodes": NUMBER,
    "ntasks-per-node": NUMBER,
    "gpus-per-node": rf"({WORD}:)?{NUMBER}",
    "cpus-per-task": NUMBER,
    "exclusive": None,
    "time": r"(\d+-)?\d{1,2}:\d{2}:\d{2}",
    "partition": WORD,
    "account": WORD,
    "signal": r"([RB]{1,2}:)?[A-Z0-9]+(@\d+)?",
    "output": r"[\w%./-]+",
}
"""Long options of sbatch(1) that this project writes -> pattern of the value, or None if the option takes no value."""


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return what the script prints."""
    assert make_job_files.main(list(argv)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def sbatch_options(script: str) -> dict[str, str | None]:
    """Return the options of a batch script as sbatch reads them: directives before the first command."""
    options: dict[str, str | None] = {}
    for line in script.splitlines()[1:]:
        if not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            match = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line)
            assert match is not None, line
            pattern = SBATCH[match[1]]
            assert (match[2] is None) if pattern is None else re.fullmatch(pattern, match[2] or ""), line
            assert match[1] not in options, line
            options[match[1]] = match[2]
    return options


# ---- golden files ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argv", "name"), [((*SLURM, *SLURM_RUN), "slurm.sh"), ((*KUBERNETES, *KUBERNETES_RUN), "rayjob.yaml")]
)
def test_a_file_is_as_the_golden_one(argv: tuple[str, ...], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, *argv) == (GOLDEN / name).read_text()


def test_sbatch_reads_the_nodes_of_the_plan() -> None:
    options = sbatch_options((GOLDEN / "slurm.sh").read_text())
    assert (options["nodes"], options["gpus-per-node"], options["ntasks-per-node"]) == ("8", "8", "1")
    assert options["signal"] == "B:TERM@900" and "exclusive" in options


def test_the_rayjob_fits_the_schema_and_holds_no_secret() -> None:
    manifest = yaml.safe_load((GOLDEN / "rayjob.yaml").read_text())
    jsonschema.validate(manifest, RAY_JOB)
    cluster = manifest["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["workerGroupSpecs"][0]["replicas"] == 3
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    containers = [pod["template"]["spec"]["containers"][0] for pod in pods]
    assert [c["resources"]["limits"]["nvidia.com/gpu"] for c in containers] == ["8", "8"]
    assert all(c["envFrom"] == [{"secretRef": {"name": "keys"}}] for c in containers)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**manifest, "specs": {}}, RAY_JOB)


@pytest.mark.skipif(CRD_VARIABLE not in os.environ, reason=f"{CRD_VARIABLE} is not set (nightly CI sets it)")
def test_the_rayjob_fits_the_published_schema(capsys: pytest.CaptureFixture[str]) -> None:
    schema = published_schema(Path(os.environ[CRD_VARIABLE]))
    one_node = output(capsys, *KUBERNETES, "+recipe=qwen3_30b_a3b")
    for text in ((GOLDEN / "rayjob.yaml").read_text(), one_node):
        manifest = yaml.safe_load(text)
        jsonschema.validate(manifest, schema)
        container = manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
        container["unknownField"] = 1
        with pytest.raises(jsonschema.ValidationError, match="unknownField"):
            jsonschema.validate(manifest, schema)


def test_a_run_on_one_node_has_no_workers(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = yaml.safe_load(output(capsys, *KUBERNETES, "+recipe=qwen3_30b_a3b"))
    jsonschema.validate(manifest, RAY_JOB)
    assert "workerGroupSpecs" not in manifest["spec"]["rayClusterSpec"]


def test_nodes_follow_from_the_plan() -> None:
    assert node_layout(["+recipe=qwen3_next_80b_a3b"], 8, "H100").num_nodes == 4
    assert node_layout(["+recipe=qwen3_4b_gsm8k"], 8).num_nodes == 1
    assert node_layout(["+recipe=qwen3_4b_gsm8k"], 999, "NVIDIA H100 80GB HBM3").num_nodes == 1
    small = ["+recipe=qwen3_4b_gsm8k", "placement.actor_num_nodes=2", "placement.actor_num_gpus_per_node=4"]
    assert node_layout(small, 4).num_nodes == 2
    assert node_layout(small, 8).num_nodes == 2, "two trainer nodes are never the same node"
    split = ["placement.mode=split", "placement.offload_train=false", "placement.offload_rollout=false"]
    engine = ["rollout.tp=4", "rollout.num_engines=1", "rollout.engine_num_nodes=1"]
    blocks = ["+recipe=qwen3_4b_gsm8k", *split, *engine, "parallel.tp=4", "placement.actor_num_gpus_per_node=8"]
    assert node_layout(blocks, 8).num_nodes == 2
    assert node_layout([*blocks, "placement.actor_num_gpus_per_node=4", "rollout.num_engines=2"], 6).num_nodes == 3
    wide = [
        "+recipe=qwen3_4b_gsm8k",
        *split,
        "rollout.tp=8",
        "rollout.num_engines=1",
        "placement.actor_num_gpus_per_node=1",
    ]
    assert node_layout([*wide, "placement.actor_num_nodes=2"], 8).num_nodes == 2, "the engine spans both nodes"
    one_node = "rollout.symmetric_memory=true"  # refused for an engine over several nodes
    assert node_layout([*wide, "placement.actor_num_nodes=2", one_node], 8).num_nodes == 3


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((*SLURM, "--time", "tomorrow", *SLURM_RUN), "--time 'tomorrow' is not a time limit of sbatch"),
        ((*SLURM, "--partition", "a b", *SLURM_RUN), "--partition 'a b' is not a Slurm name"),
        ((*SLURM, "--save-s", "-5", *SLURM_RUN), "--save-s -5 is not a number of seconds before the time limit"),
        ((*SLURM, "--cpus", "4", *SLURM_RUN), "--cpus 4 is below --gpus-per-node 8"),
        ((*SLURM, "--gpus-per-node", "4", *SLURM_RUN), "placement.actor_num_gpus_per_node=8 with --gpus-per-node 4"),
        (
            (*SLURM, "+recipe=quickstart", "placement.device=cpu"),
            "placement.device=cpu: job files are written only for runs on nodes with GPUs",
        ),
        (
            (
                *SLURM,
                "+recipe=qwen3_4b_gsm8k",
                "placement.actor_num_gpus_per_node=null",
                "parallel.tp=4",
                "parallel.pp=4",
            ),
            "--gpus-per-node 8: placement.actor_num_nodes=1 with 16 trainer ranks on each needs .* set placement.actor_num_nodes=2",
        ),
        ((*SLURM, "--gpus-per-node", "0", *SLURM_RUN), "--gpus-per-node 0 must be from 1 to 999"),
        ((*SLURM, "--gpus-per-node", "1000", *SLURM_RUN), "--gpus-per-node 1000 must be from 1 to 999"),
        ((*SLURM, "--gpu", "3090", *SLURM_RUN), "--gpu 3090 is not the name of a GPU: give one of .*H200.* no --gpu"),
        ((*SLURM, "--gpu", "H100", *SLURM_RUN), "the run needs .* GiB on a GPU"),
        ((*SLURM, *SLURM_RUN, "--doctor"), "--doctor does not start a run"),
        ((*SLURM, *SLURM_RUN, "reward.remote_url=http://a:b@c/d"), "reward.remote_url contains a URL with a password"),
        ((*KUBERNETES, "--memory", "much", *KUBERNETES_RUN), "--memory 'much' is not a Kubernetes quantity"),
        ((*KUBERNETES, "--claim", "A_b", *KUBERNETES_RUN), "--claim 'A_b' is not a Kubernetes name"),
        ((*KUBERNETES, "--image", "a b", *KUBERNETES_RUN), "--image 'a b' is not the name of an image"),
        ((*KUBERNETES, "--mount", "here", *KUBERNETES_RUN), "--mount 'here' is not an absolute path"),
        ((*KUBERNETES, "--hours", "0", *KUBERNETES_RUN), "--hours 0 must be 1 or more"),
    ],
)
def test_bad_input_names_the_option(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_job_files.main(list(argv)) == 2
    assert re.match(f"ConfigError: {message}", capsys.readouterr().err)


# ---- the batch script in a shell -------------------------------------------------------------------------------------
PYTHON = """#!/bin/bash
case "$1" in
    -c) echo a_token ;;
    scripts/submit.py) echo "$@" > nodes; [ -z "${NO_NODES:-}" ] || exit 1 ;;
    train.py)
        trap 'echo saved > saved; exit 130' TERM
        echo "$RAY_AUTH_TOKEN" > token; printf '%s\\n' "$@" > unfinished; mv unfinished arguments
        [ -z "${TRAIN_CODE:-}" ] || exit "$TRAIN_CODE"
        while :; do sleep 0.05; done ;;
esac
"""
RAY = """#!/bin/bash
echo "$@" > "ray_$SLURM_NODEID"
trap 'echo ended >> "ray_$SLURM_NODEID"; exit 0' TERM
while :; do sleep 0.05; done
"""
SRUN = """#!/bin/bash
trap 'kill $(jobs -p); wait; exit 0' TERM
echo "$@" > srun_options
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=0 "$@" &
while :; do sleep 0.05; done
"""


@contextlib.contextmanager
def run_script(folder: Path, **environment: str) -> Generator[subprocess.Popen[bytes]]:
    """Run the batch script with stand-ins for srun, ray and Python. Its processes are killed at the end of the block."""
    (folder / ".venv" / "bin").mkdir(parents=True)
    for path, text in ((".venv/bin/python", PYTHON), (".venv/bin/ray", RAY), ("srun", SRUN)):
        (folder / path).write_text(text)
        (folder / path).chmod(0o755)
    layout = NodeLayout("a", ("+recipe=a", "run.name=it's new"), 2, 8)
    (folder / "job.sh").write_text(slurm_script(layout, SlurmOptions(str(folder))))
    variables = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **environment}
    process = subprocess.Popen(["bash", folder / "job.sh"], env=variables, cwd="/", start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(path: Path) -> str:
    deadline = Deadline("test", "the batch script", 20)
    while not path.exists() or not path.read_text():
        time.sleep(min(0.02, deadline.remaining(str(path))))
    return path.read_text()


def end(process: subprocess.Popen[bytes]) -> int:
    return process.wait(Deadline("test", "the batch script", 20).limit)


def test_slurms_signal_lets_the_run_save_and_ends_ray(tmp_path: Path) -> None:
    with run_script(tmp_path) as process:
        arguments = wait_for(tmp_path / "arguments").splitlines()
        assert arguments[:3] == ["train.py", "+recipe=a", "run.name=it's new"]
        assert re.fullmatch(r"placement.ray_address=[\d.]+:6379", arguments[3])
        assert wait_for(tmp_path / "nodes") == "scripts/submit.py nodes --wait-for 2 --within 600\n"
        assert wait_for(tmp_path / "srun_options").split()[0] == "--cpus-per-task=64", (
            "otherwise some clusters give a step one CPU"
        )
        assert wait_for(tmp_path / "token") == "a_token\n" and "a_token" not in wait_for(tmp_path / "ray_0")
        process.send_signal(signal.SIGTERM)
        assert end(process) == 130
        assert (tmp_path / "saved").exists() and "ended" in (tmp_path / "ray_0").read_text()


@pytest.mark.parametrize("code", ["0", "1", "2"])
def test_the_batch_script_returns_the_code_of_train_py(tmp_path: Path, code: str) -> None:
    with run_script(tmp_path, TRAIN_CODE=code) as process:
        assert end(process) == int(code)


@pytest.mark.parametrize(
    ("name", "listing", "address"),
    [
        ("echo 10.0.0.1", "exit 1", "10.0.0.1"),
        ("echo ::1 127.0.1.1", "echo 'fd00::1 10.0.0.2 10.0.0.3 '", "10.0.0.2"),
        ("exit 1", "echo 10.0.0.2", "10.0.0.2"),
        ("echo 127.0.0.1", "exit 1", ""),
    ],
)
def test_the_address_of_a_node_is_not_loopback(tmp_path: Path, name: str, listing: str, address: str) -> None:
    hostname = tmp_path / "hostname"
    hostname.write_text(f'#!/bin/bash\n[ "$1" = --ip-address ] && {{ {name}; exit; }}\n{listing}\n')
    hostname.chmod(0o755)
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = f'set -euo pipefail\nhead=$({ADDRESS})\necho "head $head"'
    assert subprocess.check_output(["bash", "-c", script], env=variables, text=True) == f"head {address}\n"


def test_nodes_that_do_not_join_end_the_batch_script(tmp_path: Path) -> None:
    with run_script(tmp_path, NO_NODES="1") as process:
        assert end(process) == 1
    assert not (tmp_path / "arguments").exists()
