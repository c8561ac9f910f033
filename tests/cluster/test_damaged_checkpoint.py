"""Checkpoints that are damaged, or written with another model, trainer or data, are refused before a process starts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slime_like.checkpoint.files import (
    LATEST,
    iteration_folder,
)
from slime_like.checkpoint.record import Manifest, Scalar, read_record, write_manifest
from slime_like.cluster.plan.verify import on_ranks, verify_initial_checkpoints
from slime_like.cluster.start.launch import launch
from slime_like.cluster.start.resume import first_rollout
from slime_like.config.schema.role_algo import PpoConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import CheckpointError, ConfigError
from tests.cluster.run_folder import (
    config,
    flip,
    manifest,
    record_run,
    repack,
    shard,
    side,
    used_folder,
    without_hashes,
)
from tests.config.model_folder import SHAPE, write_model
from tests.unchanged import unchanged


def edit_state(run_dir: Path, **changes: object) -> None:
    path = side(run_dir, "state_4.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_manifest(run_dir: Path, **changes: object) -> None:
    manifest(run_dir).write_text(json.dumps({**json.loads(manifest(run_dir).read_text()), **changes}))


def change_model(run_dir: Path) -> None:
    write_model(run_dir / "model", num_hidden_layers=6)


def change_format(run_dir: Path) -> None:
    values = json.loads(manifest(run_dir).read_text())
    manifest(run_dir).write_text(json.dumps({**values, "format": 99}))


def change_padding(run_dir: Path) -> None:
    """Record the vocabulary padding of tp=3."""
    record = read_record(shard(run_dir).parent)
    write_manifest(
        shard(run_dir).parent,
        replace(record.manifest, model={**record.manifest.model, "padded_vocabulary": 384}),
        rollout=record.rollout,
    )


def rename_away(run_dir: Path) -> None:
    shard(run_dir).parent.rename(run_dir / "elsewhere")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard cut": (
        lambda d: shard(d).write_bytes(b"x" * 60),
        r"__0_0\.distcp: has the wrong size, 60 bytes instead of 100",
    ),
    "shard lost": (lambda d: shard(d).unlink(), r"__0_0\.distcp: missing or not readable"),
    "metadata lost": (
        lambda d: shard(d).with_name("metadata.json").unlink(),
        r"metadata\.json: missing or not readable",
    ),
    "manifest lost": (lambda d: [manifest(d).unlink(), shard(d).with_name("metadata.json").unlink()], "incomplete"),
    "manifest garbled": (lambda d: manifest(d).write_text("{"), r"checkpoint\.json cannot be read as JSON"),
    "manifest of something else": (
        lambda d: manifest(d).write_text("[1]"),
        r"checkpoint\.json contains \[1\] instead of a JSON object",
    ),
    "another format": (change_format, r"checkpoint\.json: format 99, this version reads 2"),
    "another trainer's": (lambda d: manifest(d).unlink(), r"another trainer .* model\.megatron_checkpoint"),
    "folder lost": (rename_away, r"iter_0000004: missing, though .* names it"),
    "another model": (change_model, r"num_hidden_layers is 4, but 6 in model\.hf_checkpoint"),
    "another padding": (
        change_padding,
        r"iter_0000004: its vocabulary is padded to 384 rows, but tp=1 pads it to 128: resume with the same tp",
    ),
    "rollout state lost": (
        lambda d: (d / "checkpoints" / "rollout" / "state_4.json").unlink(),
        r"state_4\.json: missing",
    ),
    "latest lost": (
        lambda d: (d / "checkpoints" / LATEST).unlink(),
        r"missing, though .*checkpoints contains iter_0000002, iter_0000004: write 4 into it .* another run\.dir to start over",
    ),
    "latest says none": (lambda d: (d / "checkpoints" / LATEST).write_text("none"), "says none, though"),
    "latest says 0": (lambda d: (d / "checkpoints" / LATEST).write_text("0"), "iter_0000000: missing, though"),
    "latest emptied": (lambda d: (d / "checkpoints" / LATEST).write_text(""), "says '', which is not an iteration"),
    "shard flipped": (lambda d: flip(shard(d)), r"__0_0\.distcp: changed since it was written: .*SHA-256"),
    "two files flipped": (
        lambda d: [flip(shard(d)), flip(shard(d).with_name("metadata.json"))],
        r"__0_0\.distcp: changed since .* \(and so are metadata\.json\)",
    ),
    "manifest edited": (
        lambda d: edit_manifest(d, schedule_steps=40),
        r"checkpoint\.json: changed since it was written",
    ),
    "state edited": (lambda d: edit_state(d, in_flight=0), r"state_4\.json: changed since it was written"),
    "leftover edited": (lambda d: flip(side(d, "leftover_4.npz")), r"leftover_4\.npz: changed"),
    "made groups edited": (
        lambda d: repack(side(d, "leftover_4_made_4.npz")),
        r"leftover_4_made_4\.npz: (changed|has the wrong size)",
    ),
    "groups in flight edited": (
        lambda d: repack(side(d, "leftover_4_in_flight.npz")),
        r"leftover_4_in_flight\.npz: (changed|has the wrong size)",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_before_anything_starts(name: str, tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    damage, message = DAMAGES[name]
    damage(run_dir)
    with unchanged(tmp_path), pytest.raises(CheckpointError, match=message) as error_info, launch(config(run_dir)):
        pass
    assert "\n" not in str(error_info.value)
    if name in ("shard cut", "shard lost", "folder lost"):
        assert "write another iteration (2)" in str(error_info.value)
        (run_dir / "checkpoints" / LATEST).write_text("2")  # as the message says
        assert first_rollout(config(run_dir), run_dir) == 2


INPUTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "tokenizer": (
        lambda d: (d / "model" / "tokenizer.json").write_text('{"edited": 1}'),
        r"model\.hf_checkpoint/tokenizer\.json changed since iter_0000004 was written: restore the old version",
    ),
    "chat template": (
        lambda d: (d / "model" / "chat_template.jinja").write_text("{{ messages }}"),
        r"model\.hf_checkpoint/chat_template\.jinja changed",
    ),
    "config.json": (
        lambda d: write_model(d / "model", rope_theta=5.0),
        r"model\.hf_checkpoint/config\.json \(rope_theta .* -> 5\.0\) changed",
    ),
    "data": (lambda d: (d / "train.jsonl").write_text('{"input": "1 + 1", "label": "3"}\n'), r"data\.train changed"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_a_changed_input_is_refused_unless_resume_names_the_checkpoint(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = used_folder(tmp_path / "run")
    change, message = INPUTS[name]
    change(run_dir)
    with unchanged(tmp_path), pytest.raises(ConfigError, match=message), launch(config(run_dir)):
        pass
    assert first_rollout(config(run_dir, resume=str(run_dir / "checkpoints")), run_dir) == 4
    warning = capsys.readouterr().err
    assert warning.count("differs from the files with which the checkpoint was trained") == (name != "data")


def test_verify_checkpoint_size_compares_sizes_only(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    flip(shard(run_dir))
    cfg = config(run_dir)
    with pytest.raises(CheckpointError, match=r"load it as it is with run\.verify_checkpoint=size"):
        first_rollout(cfg, run_dir)
    assert first_rollout(replace(cfg, run=replace(cfg.run, verify_checkpoint="size")), run_dir) == 4


def test_checkpoints_without_hashes_are_read_with_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = used_folder(tmp_path / "run")
    without_hashes(run_dir)
    flip(shard(run_dir))
    assert first_rollout(config(run_dir), run_dir) == 4
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {shard(run_dir).parent}: written by a version that recorded no hashes; only the sizes of its files are checked"
    ]
    with pytest.raises(ConfigError, match=r"optim\.lr 0\.001 -> 0\.0\)"):
        first_rollout(config(run_dir, lr=0.0), run_dir)


def test_weights_of_another_run_are_compared_too(tmp_path: Path) -> None:
    other_dir, run_dir = used_folder(tmp_path / "other"), tmp_path / "run"
    write_model(run_dir / "model")
    cfg = config(run_dir)
    cfg = replace(cfg, model=replace(cfg.model, megatron_checkpoint=str(other_dir / "checkpoints")))
    verify_initial_checkpoints(cfg)
    flip(shard(other_dir))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: changed"):
        verify_initial_checkpoints(cfg)
    multi_node = replace(cfg, placement=replace(cfg.placement, actor_num_nodes=2))
    assert on_ranks(multi_node) and not on_ranks(cfg)


def test_a_plain_optimizer_cannot_read_a_distributed_one(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    cfg = config(run_dir)
    cfg = replace(cfg, parallel=replace(cfg.parallel, distributed_optimizer=False))
    with pytest.raises(
        CheckpointError, match=r"parallel\.distributed_optimizer=True, which cannot be loaded with False"
    ):
        first_rollout(cfg, run_dir)


def with_critic(run_dir: Path, content: dict[str, Scalar]) -> TrainConfig:
    """Return the config of a PPO run whose checkpoint of iteration 4 has a critic with ``content``."""
    folder = iteration_folder(run_dir / "checkpoints" / "critic", 4)
    folder.mkdir(parents=True)
    write_manifest(folder, Manifest(4, 4, 4, 1e-3, 0.0, True, {"tp": 1}, {**SHAPE, "head": "value", **content}))
    cfg = replace(config(run_dir), algo=PpoConfig())
    record_run(run_dir, cfg)
    return cfg


def test_a_critic_of_another_model_is_named_with_the_critics_key(tmp_path: Path) -> None:
    run_dir = used_folder(tmp_path / "run")
    cfg = with_critic(run_dir, {"hidden_size": 32})
    with pytest.raises(
        CheckpointError, match=r"critic/iter_0000004 was .*hidden_size is 32, but 64 in model\.hf_checkpoint="
    ):
        first_rollout(cfg, run_dir)
    (run_dir / "small").mkdir()
    (run_dir / "small" / "config.json").write_text(
        json.dumps({**SHAPE, "hidden_size": 32, "tie_word_embeddings": True})
    )
    cfg = replace(cfg, critic=replace(cfg.critic, hf_checkpoint=str(run_dir / "small")))
    record_run(run_dir, cfg)
    assert first_rollout(cfg, run_dir) == 4
    wrong = replace(cfg, critic=replace(cfg.critic, hf_checkpoint=str(run_dir / "model")))
    record_run(run_dir, wrong)
    with pytest.raises(CheckpointError, match=r"hidden_size is 32, but 64 in critic\.hf_checkpoint="):
        first_rollout(wrong, run_dir)
