"""Where a run starts is settled, and what it would start from looked through, before any process starts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slime_like.checkpoint_files import (
    LATEST,
    Manifest,
    Scalar,
    iteration_folder,
    iterations,
    prune,
    write_manifest,
    write_text,
)
from slime_like.cluster.checkpoints import remove_leftovers
from slime_like.cluster.launch import launch
from slime_like.cluster.resume import first_rollout
from slime_like.cluster.rollouts import read_state
from slime_like.config.algo import GrpoConfig
from slime_like.config.load import to_yaml
from slime_like.config.model import OptimConfig
from slime_like.config.role_algo import PpoConfig
from slime_like.config.root import TrainConfig
from slime_like.config.run import LoopConfig, RunConfig
from slime_like.data.dump import save_groups
from slime_like.errors import CheckpointError, ConfigError, RunComplete
from tests.config.model_folder import SHAPE, write_model
from tests.unchanged import unchanged


def config(run_dir: Path, *, resume: str = "auto", lr: float = 1e-3, num_rollout: int = 10) -> TrainConfig:
    made = TrainConfig(
        algo=GrpoConfig(),
        run=RunConfig(dir=str(run_dir), resume=resume),
        optim=OptimConfig(lr=lr),
        loop=LoopConfig(num_rollout=num_rollout),
    )
    return replace(
        made,
        model=replace(made.model, hf_checkpoint=str(run_dir / "model")),
        data=replace(made.data, train="t"),
        evaluation=made.evaluation,
    )


def used_folder(run_dir: Path, latest: str = "4") -> Path:
    """A run folder with checkpoints of iterations 2 and 4, of which ``latest`` is named."""
    checkpoints = run_dir / "checkpoints"
    for iteration in (2, 4):
        folder = iteration_folder(checkpoints, iteration)
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp").write_bytes(b"x" * 100)
        (folder / "metadata.json").write_text("{}")
        model: dict[str, Scalar] = {**SHAPE, "padded_vocabulary": 128}
        write_manifest(folder, Manifest(iteration, iteration, iteration, 1e-3, 0.0, True, {"tp": 1}, model))
        write_text(checkpoints / "rollout" / f"state_{iteration}.json", "{}")
    (checkpoints / LATEST).write_text(latest)
    (run_dir / "config.yaml").write_text(to_yaml(config(run_dir)))
    write_model(run_dir / "model")
    return run_dir


def test_an_empty_folder_starts_afresh(tmp_path: Path) -> None:
    assert first_rollout(config(tmp_path), tmp_path) == 0


def test_auto_goes_on_also_when_the_run_grows(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    assert first_rollout(config(run_dir, num_rollout=20), run_dir) == 4


def test_auto_refuses_another_experiment_and_names_the_way(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"optim\.lr 0\.001 -> 0\.0\): choose another run\.dir .*run\.resume=.*checkpoints"
    ):
        first_rollout(config(run_dir, lr=0.0), run_dir)
    assert first_rollout(config(run_dir, lr=0.0, resume=str(run_dir / "checkpoints")), run_dir) == 4


def test_auto_goes_on_under_another_guard(tmp_path: Path) -> None:
    """What a run that ended for want of memory, or at a deadline of the guard, is told to change."""
    run_dir = used_folder(tmp_path / "run")
    cfg = config(run_dir)
    cfg = replace(cfg, guard=replace(cfg.guard, action="trim", deadline_s=900.0))
    assert first_rollout(cfg, run_dir) == 4


def test_a_complete_run_says_so(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    with pytest.raises(RunComplete, match=r"4 rollouts were trained, loop\.num_rollout is 4"):
        first_rollout(config(run_dir, num_rollout=4), run_dir)


def test_never_refuses_a_used_folder(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"run\.resume=never, but run\.dir"):
        first_rollout(config(run_dir, resume="never"), run_dir)


def test_a_path_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=LATEST):
        first_rollout(config(tmp_path, resume=str(tmp_path)), tmp_path)


def test_a_marker_that_is_no_number_is_refused(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run", "release")
    with pytest.raises(CheckpointError, match="'release', which is not an iteration"):
        first_rollout(config(run_dir), run_dir)


def test_a_foreign_path_is_refused_where_the_folder_has_its_own(tmp_path: Path) -> None:
    """Else the same command, given again after a crash, would start over and write over what it had."""
    other, run_dir = used_folder(tmp_path / "other"), used_folder(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"checkpoints of its own \(iteration 4\): run\.resume=auto"):
        first_rollout(config(run_dir, resume=str(other / "checkpoints")), run_dir)


def shard(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "iter_0000004" / "__0_0.distcp"


def manifest(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "iter_0000004" / "checkpoint.json"


def change_model(run_dir: Path) -> None:
    write_model(run_dir / "model", num_hidden_layers=6)


def change_format(run_dir: Path) -> None:
    values = json.loads(manifest(run_dir).read_text())
    manifest(run_dir).write_text(json.dumps({**values, "format": 99}))


def change_padding(run_dir: Path) -> None:
    """What tp=3 makes of it."""
    values = json.loads(manifest(run_dir).read_text())
    values["model"]["padded_vocabulary"] = 384
    manifest(run_dir).write_text(json.dumps(values))


def rename_away(run_dir: Path) -> None:
    shard(run_dir).parent.rename(run_dir / "elsewhere")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard cut": (lambda d: shard(d).write_bytes(b"x" * 60), r"__0_0\.distcp: torn, 60 bytes where 100 were written"),
    "shard lost": (lambda d: shard(d).unlink(), r"__0_0\.distcp: missing"),
    "metadata lost": (lambda d: shard(d).with_name("metadata.json").unlink(), r"metadata\.json: missing"),
    "manifest lost": (lambda d: [manifest(d).unlink(), shard(d).with_name("metadata.json").unlink()], "incomplete"),
    "manifest garbled": (lambda d: manifest(d).write_text("{"), r"checkpoint\.json: garbled"),
    "manifest of something else": (lambda d: manifest(d).write_text("[1]"), r"checkpoint\.json: garbled"),
    "another format": (change_format, r"checkpoint\.json: format 99, this version reads 1"),
    "another trainer's": (lambda d: manifest(d).unlink(), r"another trainer .* model\.megatron_checkpoint"),
    "folder lost": (rename_away, r"iter_0000004: missing, though .* names it"),
    "another model": (change_model, r"num_hidden_layers is 4 there and 6 in model\.hf_checkpoint"),
    "another padding": (
        change_padding,
        r"iter_0000004: its vocabulary is padded to 384 rows, tp=1 pads it to 128: resume with the tp it was saved with",
    ),
    "rollout side lost": (
        lambda d: (d / "checkpoints" / "rollout" / "state_4.json").unlink(),
        r"state_4\.json cannot be read",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_before_anything_starts(name: str, tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    damage, message = DAMAGES[name]
    damage(run_dir)
    with unchanged(tmp_path), pytest.raises(CheckpointError, match=message) as raised, launch(config(run_dir)):
        pass
    assert "\n" not in str(raised.value)
    if name in ("shard cut", "shard lost", "folder lost"):
        assert "write an earlier iteration (2)" in str(raised.value)
        (run_dir / "checkpoints" / LATEST).write_text("2")  # as the message says
        assert first_rollout(config(run_dir), run_dir) == 2


def test_a_plain_optimizer_cannot_read_a_distributed_one(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    cfg = config(run_dir)
    cfg = replace(cfg, parallel=replace(cfg.parallel, distributed_optimizer=False))
    with pytest.raises(
        CheckpointError, match=r"parallel\.distributed_optimizer=True, which cannot be loaded with False"
    ):
        first_rollout(cfg, run_dir)


def with_critic(run_dir: Path, content: dict[str, Scalar]) -> TrainConfig:
    """A run of PPO whose checkpoint of iteration 4 holds a critic with ``content``."""
    folder = iteration_folder(run_dir / "checkpoints" / "critic", 4)
    folder.mkdir(parents=True)
    write_manifest(folder, Manifest(4, 4, 4, 1e-3, 0.0, True, {"tp": 1}, {**SHAPE, "head": "value", **content}))
    cfg = replace(config(run_dir), algo=PpoConfig())
    (run_dir / "config.yaml").write_text(to_yaml(cfg))
    return cfg


def test_a_critic_of_another_model_is_named_with_the_critics_key(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    cfg = with_critic(run_dir, {"hidden_size": 32})
    with pytest.raises(
        CheckpointError, match=r"critic/iter_0000004: .*hidden_size is 32 .* 64 in model\.hf_checkpoint="
    ):
        first_rollout(cfg, run_dir)
    (run_dir / "small").mkdir()
    (run_dir / "small" / "config.json").write_text(
        json.dumps({**SHAPE, "hidden_size": 32, "tie_word_embeddings": True})
    )
    cfg = replace(cfg, critic=replace(cfg.critic, hf_checkpoint=str(run_dir / "small")))
    (run_dir / "config.yaml").write_text(to_yaml(cfg))
    assert first_rollout(cfg, run_dir) == 4
    wrong = replace(cfg, critic=replace(cfg.critic, hf_checkpoint=str(run_dir / "model")))
    (run_dir / "config.yaml").write_text(to_yaml(wrong))
    with pytest.raises(CheckpointError, match=r"hidden_size is 32 there and 64 in critic\.hf_checkpoint="):
        first_rollout(wrong, run_dir)


def test_leftovers_go_and_nothing_else(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    before = sorted(run_dir.rglob("*"))
    for name in ("checkpoints/iter_0000006.tmp", "checkpoints/critic/iter_0000006.tmp", "hf_iter_0000006.tmp"):
        (run_dir / name).mkdir(parents=True)
        (run_dir / name / "__0_0.distcp").write_text("half")
    (run_dir / "checkpoints" / "rollout" / "state_6.json.tmp").write_text("half")
    remove_leftovers(run_dir)
    (run_dir / "checkpoints" / "critic").rmdir()
    assert sorted(run_dir.rglob("*")) == before
    assert first_rollout(config(run_dir), run_dir) == 4


def test_pruning_keeps_the_newest_and_the_one_that_is_named(tmp_path: Path) -> None:
    checkpoints = used_folder(tmp_path / "run") / "checkpoints"
    prune(checkpoints, 1)
    assert iterations(checkpoints) == [4]
    assert [path.name for path in (checkpoints / "rollout").iterdir()] == ["state_4.json"]
    iteration_folder(checkpoints, 6).mkdir()  # whole, but not yet named
    prune(checkpoints, 1)
    assert iterations(checkpoints) == [4, 6]


def test_groups_go_with_the_iteration_they_were_saved_in(tmp_path: Path) -> None:
    """Rollouts that were made ahead bear numbers of their own, which are no iterations where saves are far apart."""
    rollout = used_folder(tmp_path / "run") / "checkpoints" / "rollout"
    for name in ("leftover_2", "leftover_2_made_2", "leftover_2_made_3", "leftover_4", "leftover_4_made_5"):
        save_groups(rollout / f"{name}.npz", ())
    write_text(rollout / "state_3.json", "{}")  # of a save that failed
    write_text(rollout / "state_5.json", "{}")  # of one that is being written
    prune(rollout.parent, 1)
    assert sorted(path.name for path in rollout.iterdir()) == [
        "leftover_4.npz",
        "leftover_4_made_5.npz",
        "state_4.json",
        "state_5.json",
    ]


@pytest.mark.parametrize("torn", [True, False])
def test_groups_that_a_checkpoint_lost_are_missed_before_anything_starts(tmp_path: Path, torn: bool) -> None:
    folder = tmp_path / "rollout"
    folder.mkdir()
    (folder / "state_3.json").write_text(json.dumps({"next_rollout": 3, "cursor": {}, "made": []}))
    if torn:
        (folder / "leftover_3.npz").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"leftover_3\.npz: groups of this checkpoint .+ another checkpoint"):
        read_state(tmp_path, 3)
    save_groups(folder / "leftover_3.npz", ())
    assert read_state(tmp_path, 3)["next_rollout"] == 3
