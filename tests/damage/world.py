"""Small files of every kind that a run reads: a model and its reference, data, a recipe, and a stopped run."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slime_like.checkpoint.files import LATEST, iteration_folder, name_latest, side_files
from slime_like.checkpoint.record import Manifest, add_run, describe_files, write_manifest
from slime_like.cluster.run.rollout_state import leftover_path, manager_base, write_manager_states
from slime_like.cluster.run.status import ControlReply, RunStatus, write_status
from slime_like.cluster.start.identity import run_record
from slime_like.config.load.loader import load_config, to_yaml
from slime_like.config.schema.root import TrainConfig
from slime_like.data import faults
from slime_like.data.dump import rollout_path, save_groups
from slime_like.data.share import ManagerShare
from slime_like.data.token_table import TokenTable, save_table, table_path
from slime_like.metrics.sinks import JsonlSink
from slime_like.quickstart.model import CONCATENATED_MESSAGES, write_tokenizer
from slime_like.rollout.collect.state import generated_path, in_flight_path
from slime_like.types import Prompt, Reward, Sample, SampleGroup, Source, Span
from slime_like.types import Status as Ended

NUM_DONE = 4  # rollouts that the run has trained
NUM_MANAGERS = {"run": 1, "managers": 2}
"""Folder of a run -> rollout managers that wrote its checkpoint."""
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "eos_token_id": 1,
}
LAYER = {
    "input_layernorm.weight": (32,),
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32),
    "self_attn.q_norm.weight": (16,),
    "self_attn.k_norm.weight": (16,),
    "post_attention_layernorm.weight": (32,),
    "mlp.gate_proj.weight": (64, 32),
    "mlp.up_proj.weight": (64, 32),
    "mlp.down_proj.weight": (32, 64),
}
RECIPE = """# @package _global_
run:
  name: damaged
model:
  hf_checkpoint: {root}/model
  ref_checkpoint: {root}/reference
data:
  train: {root}/train.jsonl
evaluation:
  datasets: {{heldout: {root}/heldout.parquet}}
reward:
  name: exact
loop:
  num_rollout: 10
rollout:
  batch_size: 2
  n_samples_per_prompt: 2
  max_response_len: 6
algo:
  kl_loss_coef: 0.1
"""


def argv(root: Path) -> list[str]:
    """Return the command line of the run."""
    return ["--config-dir", str(root / "recipes"), "+recipe=mine", f"run.dir={root / 'run'}"]


def build(root: Path) -> TrainConfig:
    """Write every file below ``root``; return the run's configuration."""
    tensors = {f"model.layers.{i}.{name}": shape for i in (0, 1) for name, shape in LAYER.items()}
    tensors |= {"model.embed_tokens.weight": (32, 32), "model.norm.weight": (32,)}
    for name in ("model", "reference"):
        folder = root / name
        write_tokenizer(folder, chat_template=CONCATENATED_MESSAGES)
        (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1], "do_sample": True}))
    _write_tensors(root / "model" / "model.safetensors", tensors)
    halves = {
        "model-1.safetensors": dict(list(tensors.items())[:11]),
        "model-2.safetensors": dict(list(tensors.items())[11:]),
    }
    for name, half in halves.items():
        _write_tensors(root / "reference" / name, half)
    file_of_tensor = {tensor: name for name, half in halves.items() for tensor in half}
    (root / "reference" / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": file_of_tensor})
    )
    _write_data(root)
    (root / "recipes" / "recipe").mkdir(parents=True)
    (root / "recipes" / "recipe" / "mine.yaml").write_text(RECIPE.format(root=root))
    cfg = load_config(argv(root))
    _write_run(cfg, root / "run")
    for name, num_managers in NUM_MANAGERS.items():
        _write_checkpoint(cfg, root / name / "checkpoints", num_managers)
    for path in (root, *root.rglob("*")):  # the soak reads unreadable files as user nobody, who needs the others
        os.chmod(path, 0o777 if path.is_dir() else 0o666)
    for path in root.parents:  # user nobody cannot enter pytest's folders
        if path.stat().st_uid == os.getuid() and not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o011)
    return cfg


def _write_tensors(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    weights = np.random.default_rng(0).normal(size=end // 4).astype(np.float32).tobytes()
    path.write_bytes(len(text).to_bytes(8, "little") + text + weights)


def _write_data(root: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"{a}+{a}=", "label": str(2 * a), "metadata": {"a": a}} for a in range(8)]
    rows.append({"prompt": [{"role": "user", "content": "9+9="}], "label": "18", "rm_type": "exact"})
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(
        pa.Table.from_pylist([{"prompt": f"{a}+1=", "label": str(a + 1)} for a in range(4)]), root / "heldout.parquet"
    )


def groups(first: int, count: int) -> list[SampleGroup]:
    """Return groups like those that a run dumps."""
    sample_groups: list[SampleGroup] = []
    for group_id in range(first, first + count):
        prompt = Prompt(group_id, np.array([3, 12, 4], np.int32), "1+2=", "3", None, {"a": 1})
        samples: list[Sample] = []
        for k in range(2):
            ids = np.array([3, 12, 4, 5, 1], np.int32)
            logprobs = np.array([np.nan, np.nan, np.nan, -0.5, -0.25], np.float32)
            spans = (Span(0, 3, Source.PROMPT), Span(3, 5, Source.MODEL, 3))
            extras = {"mask": np.ones(5, np.float32)}
            samples.append(
                Sample(
                    group_id,
                    k,
                    2 * group_id + k,
                    k,
                    ids,
                    logprobs,
                    spans,
                    Ended.COMPLETED,
                    "3",
                    Reward(1.0, 1.0),
                    extras,
                )
            )
        sample_groups.append(SampleGroup(group_id, prompt, tuple(samples)))
    return sample_groups


def _write_checkpoint(cfg: TrainConfig, checkpoints: Path, num_managers: int) -> None:
    folder = iteration_folder(checkpoints, NUM_DONE)
    folder.mkdir(parents=True)
    for name in ("__0_0.distcp", "common.pt", ".metadata"):
        (folder / name).write_bytes(np.random.default_rng(1).bytes(3000))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    name_latest(checkpoints, NUM_DONE)
    save_groups(leftover_path(checkpoints, NUM_DONE), groups(8, 1))
    for index in range(num_managers):
        base = manager_base(checkpoints, NUM_DONE, ManagerShare(index, num_managers))
        save_groups(generated_path(base, NUM_DONE), groups(9 + 2 * index, 2))
        save_groups(in_flight_path(base), groups(11 + 2 * index, 1))
    rollout = {
        "rollout_id": NUM_DONE,
        "groups": (),
        "started": 1.0,
        "stopped": 2.0,
        "num_generated": 2,
        "num_refills": 0,
    }
    state = {"next_rollout": NUM_DONE, "cursor": cursor(cfg), "in_flight": 1, "made": [rollout]}
    write_manager_states(checkpoints, NUM_DONE, [state] * num_managers)
    model = {name: CONFIG[name] for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")}
    write_manifest(
        folder,
        Manifest(
            NUM_DONE,
            NUM_DONE,
            NUM_DONE,
            1e-6,
            0.0,
            True,
            {"tp": 1, "pp": 1, "cp": 1, "dp": 1, "ep": 1, "etp": 1},
            {**model, "head": "policy"},
        ),
        rollout=describe_files(checkpoints / "rollout", side_files(checkpoints, NUM_DONE)),
    )
    add_run(folder, run_record(cfg))


def _write_run(cfg: TrainConfig, run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(to_yaml(replace(cfg)))
    sink = JsonlSink(run_dir / "metrics.jsonl", 0)
    for step in range(1, NUM_DONE + 1):
        sink.log(step, {"train/loss": 1 / step, "rollout/raw_reward": step / 10}, {"train": (step + 0.0, step + 0.5)})
    sink.close()
    faults.append(
        run_dir,
        faults.InjectedFault("kill_engine:collect:1", "engine 0", 1.0),
        faults.Recovery("engine 0", "killed", 1.5, 2.0, 3.0, 1, 2),
    )
    answer = ControlReply("save", 1.0, "done", 2, "2")
    write_status(run_dir, RunStatus(NUM_DONE, 10, running=False, requests=(answer,)))
    for rollout_id in range(2):
        save_groups(rollout_path(run_dir / "rollouts", rollout_id), groups(2 * rollout_id, 2))
        save_table(table_path(run_dir / "rollouts", rollout_id), _view())


def cursor(cfg: TrainConfig) -> dict[str, Any]:
    """Return the state of the run's data source after some rollouts."""
    from slime_like.cluster.plan.machine import probe_machine
    from slime_like.cluster.plan.planner import make_plan
    from slime_like.cluster.start.inputs import load_inputs

    source = load_inputs(cfg, make_plan(cfg, probe_machine())).source
    source.next(13)  # past the end of an epoch of 9 rows, so that the cursor has rows of the previous epoch
    return source.state()


def _view() -> TokenTable:
    ids = np.array([3, 12, 4, 5, 1], np.int32)
    nan = np.full(5, np.nan, np.float32)
    return TokenTable(
        1, np.array([0], np.int64), np.array([0, 5], np.int32), ids, ids, nan, nan, np.ones(5, np.float32), nan
    )


FILES = {
    "config.json": ("model/config.json", "reference/config.json"),
    "generation_config.json": ("model/generation_config.json",),
    "tokenizer files": ("model/tokenizer.json", "model/tokenizer_config.json", "model/chat_template.jinja"),
    "safetensors and index": (
        "model/model.safetensors",
        "reference/model-2.safetensors",
        "reference/model.safetensors.index.json",
    ),
    "data (jsonl, parquet)": ("train.jsonl", "heldout.parquet"),
    "recipe": ("recipes/recipe/mine.yaml",),
    "run.dir/config.yaml": ("run/config.yaml",),
    "metrics.jsonl": ("run/metrics.jsonl",),
    "faults.jsonl, status.json": ("run/faults.jsonl", "run/status.json"),
    LATEST: (f"run/checkpoints/{LATEST}",),
    "checkpoint.json": (f"run/checkpoints/iter_{NUM_DONE:07d}/checkpoint.json",),
    "checkpoint's tensors": (
        f"run/checkpoints/iter_{NUM_DONE:07d}/__0_0.distcp",
        f"run/checkpoints/iter_{NUM_DONE:07d}/common.pt",
        f"run/checkpoints/iter_{NUM_DONE:07d}/.metadata",
        f"run/checkpoints/iter_{NUM_DONE:07d}/metadata.json",
    ),
    "state_N.json": tuple(f"{name}/checkpoints/rollout/state_{NUM_DONE}.json" for name in NUM_MANAGERS),
    "leftover, made and in-flight npz": (
        f"run/checkpoints/rollout/leftover_{NUM_DONE}.npz",
        f"run/checkpoints/rollout/leftover_{NUM_DONE}_made_{NUM_DONE}.npz",
        f"run/checkpoints/rollout/leftover_{NUM_DONE}_in_flight.npz",
        f"managers/checkpoints/rollout/leftover_{NUM_DONE}_manager_0_in_flight.npz",
        f"managers/checkpoints/rollout/leftover_{NUM_DONE}_manager_1_made_{NUM_DONE}.npz",
    ),
    "dumped rollouts": ("run/rollouts/rollout_0000000.npz", "run/rollouts/tokens_0000000.npz"),
}
"""Files of a world by class, relative to its root."""
