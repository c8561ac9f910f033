"""Calls of ``run.prepare``. Keys that do not fit its model are rejected before it writes the model."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from slime_like.cluster.plan.shapes import PREPARED
from slime_like.cluster.plan.view import show_plan
from slime_like.cluster.start import prepared
from slime_like.cluster.start.prepared import load_prepared
from slime_like.errors import ConfigError, UserCodeError
from slime_like.quickstart import prepare
from slime_like.quickstart.prepare import PreparedJob
from slime_like.registry import resolve
from tests.config.machines import LAPTOP

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "probe_machine", lambda: LAPTOP)


def test_prepare_runs_before_files_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "make_inputs.py").write_text(
        "from pathlib import Path\n"
        "from tests.config.model_folder import write_model\n"
        "def make(cfg):\n"
        "    write_model(Path(cfg.model.hf_checkpoint))\n"
        "    Path(cfg.data.train).write_text('{}')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    argv = [f"model.hf_checkpoint={tmp_path}/m", f"data.train={tmp_path}/d.jsonl", "run.prepare=make_inputs:make"]
    assert load_prepared(argv).run.prepare == "make_inputs:make"
    with pytest.raises(ConfigError, match=r"run.prepare='make_inputs:mke'.*did you mean 'make'"):
        load_prepared([*argv, "run.prepare=make_inputs:mke"])
    with pytest.raises(ConfigError, match=r"run.prepare='.make_inputs:make': the module begins with a dot"):
        load_prepared([*argv, "run.prepare=.make_inputs:make"])


def test_an_error_of_prepare_names_the_key_and_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad_inputs.py").write_text("def make(cfg):\n    raise OSError(28, 'No space left on device')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    argv = [f"model.hf_checkpoint={tmp_path}/m", f"data.train={tmp_path}/d.jsonl", "run.prepare=bad_inputs:make"]
    problem = (
        r"run\.prepare=bad_inputs:make raised OSError: .*No space left on device \(.*bad_inputs\.py:2\), for run\.dir="
    )
    with pytest.raises(UserCodeError, match=problem):
        load_prepared(argv)


def argv_with_uncalled_prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the arguments of a run whose ``run.prepare`` fails the test if it is called."""
    (folder / "not_called.py").write_text("def make(cfg):\n    raise AssertionError('called')\n")
    monkeypatch.syspath_prepend(str(folder))
    return [f"model.hf_checkpoint={folder}/m", f"data.train={folder}/d.jsonl", "run.prepare=not_called:make"]


def test_a_cluster_that_does_not_answer_is_reported_before_prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = argv_with_uncalled_prepare(tmp_path, monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(ConfigError, match=rf"placement\.ray_address='{address}': no Ray cluster answers"):
        load_prepared([*argv, f"placement.ray_address={address}"])


def test_a_folder_that_cannot_be_written_is_refused_before_prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = argv_with_uncalled_prepare(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"run\.dir='/proc/run' cannot be written"):
        load_prepared([*argv, "run.dir=/proc/run"])


# recipe and keys, words of the message
REFUSED = {
    "KV heads": ("quickstart rollout.tp=2 rollout.dcp=2", "rollout.dcp=2 for the model in", "the model has 2"),
    "query heads": ("quickstart rollout.tp=8", "rollout.tp=8 does not divide the 4 attention heads"),
    "prefix cache": (
        "quickstart_gdn rollout.tp=2 model.gdn.backend=torch rollout.sglang.disable_radix_cache=false rollout.dcp=2",
        "the model has 2",
    ),
    "drafts": (
        "quickstart_gdn run.mode=rollout_only rollout.sglang.speculative_algorithm=NGRAM",
        "speculative_algorithm=NGRAM with placement.device=cpu",
    ),
    "virtual stages": (
        "quickstart parallel.pp=2 parallel.vpp=2",
        "4 pipeline segments are more than the model's 3 layers",
    ),
    "backend": (
        "quickstart rollout.tp=4 rollout.dcp=2 rollout.sglang.attention_backend=torch_native",
        "rollout.sglang.attention_backend=torch_native with rollout.dcp=2",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_default_job_is_refused_before_its_model_is_written(
    case: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, *words = case
    recipe, *overrides = keys.split()
    folders = (f"model.hf_checkpoint={tmp_path}/warm/hf", f"data.train={tmp_path}/assets/train.jsonl")
    argv = [f"+recipe={recipe}", *folders, *overrides]
    for refuse in (load_prepared, show_plan):
        with pytest.raises(ConfigError) as refusal:
            refuse(argv)
        assert all(word in str(refusal.value) for word in words), refusal.value
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", PREPARED)
def test_the_plan_knows_the_model_that_a_default_job_writes(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[PreparedJob] = []
    monkeypatch.setattr(prepare, "prepare_job", lambda cfg, job: jobs.append(job))
    resolve("run.prepare", path, {})(None)
    assert [job.model for job in jobs] == [PREPARED[path]]


def test_every_default_job_has_a_model_in_the_plan() -> None:
    datasets = {
        line for file in CONFIGS.rglob("*.yaml") for line in re.findall(r"^  prepare: (\S+)$", file.read_text(), re.M)
    }
    assert datasets - {"null"} == set(PREPARED)


def test_data_of_the_user_is_not_taken_for_that_of_a_default_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.jsonl").write_text("{}")
    argv = ["+recipe=quickstart", f"data.train={tmp_path}/mine/train.jsonl"]
    for load in (show_plan, load_prepared):
        with pytest.raises(ConfigError, match=r"data\.train: the folder .*mine has files .*run\.prepare=null"):
            load(argv)
