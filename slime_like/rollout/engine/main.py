"""Entry point of an engine's process: ``python -m slime_like.rollout.engine.main`` runs an SGLang HTTP server.

Only this module of slime_like and the plugins in slime_like_plugins import sglang.

The parent (``EngineServer``) sends one line of JSON on stdin, since ``ps`` would show a key on the command line, and keeps
the pipe open. When the parent exits, this process reads end-of-file and kills its process group. ``PR_SET_PDEATHSIG`` would
also fire when only the *thread* that started this process ends, so only SGLang's own workers use it.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_like.config.schema.dcp import BACKEND_FIELDS, default_backend, sharded_backend
from slime_like.config.schema.resolved import EngineSpec
from slime_like.printable import hide_in_logs, visible
from slime_like.rollout.engine import processes
from slime_like.rollout.engine.model_config import merge_overrides, override_args
from slime_like.rollout.engine.sglang_imports import sglang_imports

MODEL_OVERRIDES = "json_model_override_args"


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """Message in which the parent describes the engine to start."""

    spec: EngineSpec
    admin_key: str
    host: str
    port: int
    node_rank: int = 0
    rendezvous: str = ""  # host:port of the rendezvous of an engine on several nodes; empty on one node


def server_arguments(launch: EngineLaunch) -> dict[str, Any]:
    """Return the arguments of SGLang's ``ServerArgs`` for an engine that reads and returns token ids.

    ``spec.sglang`` overrides them, except address, keys and ``trust_remote_code``; its overrides of config.json are merged with
    those that the model needs. With decode context parallelism, ``sharded_backend`` then replaces the attention backends.
    """
    spec = launch.spec
    arguments: dict[str, Any] = {
        "model_path": spec.model_path,
        "device": spec.device,
        "dtype": spec.dtype,
        "tp_size": spec.tp,
        "context_length": spec.context_length,
        "random_seed": spec.seed,
        "max_running_requests": spec.max_running_requests,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "weight_version": "0",
        "log_level": "info",
        "log_level_http": "warning",
        "decode_log_interval": 1_000,
    }
    arguments |= _device_arguments(spec)
    if spec.num_nodes > 1:
        node = {"nnodes": spec.num_nodes, "node_rank": launch.node_rank, "dist_init_addr": launch.rendezvous}
        arguments |= node
    if spec.dp_attention > 1:
        arguments["attn_dp_size"] = spec.dp_attention
    if spec.dcp > 1:
        arguments |= {"dcp_size": spec.dcp, "dcp_comm_backend": spec.dcp_comm}
        arguments["attention_backend"] = default_backend(
            spec.device, latent=spec.latent
        )  # SGLang's default may ignore DCP
        if spec.dcp_replicate_q:
            arguments["dcp_replicate_q_proj"] = True
    if spec.device == "cuda":
        arguments |= {f"cuda_graph_backend_{phase}": "disabled" for phase in spec.uncaptured}
    if spec.returns_experts:
        arguments["enable_return_routed_experts"] = True
    if spec.releases_memory and spec.device == "cuda":
        # A push writes every weight of the model, but none of a draft model.
        arguments |= {"enable_memory_saver": True, "enable_draft_weights_cpu_backup": True}
    if spec.symmetric_memory:
        arguments["enable_symm_mem"] = True
    identity = {
        "host": launch.host,
        "port": launch.port,
        "api_key": launch.admin_key,
        "admin_api_key": launch.admin_key,
        "trust_remote_code": False,
    }
    arguments |= spec.sglang | identity
    if spec.dcp > 1:
        backends = {field: str(arguments[field]) for field in BACKEND_FIELDS if arguments.get(field) is not None}
        latent = spec.latent
        arguments |= {field: sharded_backend(name, spec.device, latent=latent) for field, name in backends.items()}
    if overrides := override_args(spec.model_path, keeps_float8=spec.float8):
        user_overrides = json.loads(arguments.get(MODEL_OVERRIDES) or "{}")
        arguments[MODEL_OVERRIDES] = json.dumps(merge_overrides(overrides, user_overrides))
    return arguments


def _device_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments that depend on the device."""
    if spec.device == "cpu":
        arguments: dict[str, Any] = {"disable_overlap_schedule": True}  # scheduler and model share the core
        return arguments | ({"attention_backend": "slime_like_exact"} if spec.deterministic else {})
    arguments = {"enable_deterministic_inference": True} if spec.deterministic else {}
    if spec.dtype == "float32":
        arguments["attention_backend"] = "triton"  # SGLang's choice on Hopper, FlashAttention 3, lacks float32
    return arguments


def die_with_parent() -> None:
    """Start a thread that waits for the parent's exit (end-of-file on stdin).

    It then removes the engine's temporary folder and shared memory, and kills this process group.
    """

    scratch = Path(os.environ.get("TMPDIR", ""))

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin: a forked worker would inherit its lock
            pass
        if scratch.name.startswith(processes.SCRATCH_PREFIX):  # created for this engine by EngineServer.start
            shutil.rmtree(scratch, ignore_errors=True)
        processes.remove_segments(processes.mapped_segments(os.getpgid(0)))
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> None:
    """Read the parent's message from stdin, and serve until killed. An error ends the process with exit code 1."""
    with os.fdopen(os.dup(0), "rb") as stdin:
        fields = json.loads(stdin.readline())
    launch = EngineLaunch(**(fields | {"spec": EngineSpec(**fields["spec"])}))
    die_with_parent()
    hide_in_logs(launch.admin_key)  # SGLang logs all of its arguments
    try:
        serve(server_arguments(launch))
    except Exception:  # noqa: BLE001 (fault boundary: at its exit, Python would wait for workers of SGLang that do not end)
        sys.stderr.write(visible(traceback.format_exc()))
        sys.stderr.flush()
        os._exit(1)


def serve(arguments: dict[str, Any]) -> None:
    """Run SGLang in this process and its workers. Plugins are loaded first, since they add valid values of the arguments."""
    with sglang_imports():
        hooks: Any = importlib.import_module("slime_like_plugins.sglang_hooks")
        hooks.load_all()
        server_args: Any = importlib.import_module("sglang.srt.server_args")
        http_server: Any = importlib.import_module("sglang.srt.entrypoints.http_server")
    http_server.launch_server(
        server_args.ServerArgs(**arguments),
        run_scheduler_process_func=functools.partial(hooks.run_worker, http_server.run_scheduler_process),
        run_detokenizer_process_func=functools.partial(hooks.run_worker, http_server.run_detokenizer_process),
    )


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # in a worker that SGLang spawns on a GPU, before it unpickles its arguments
    with sglang_imports():
        importlib.import_module("sglang.srt.managers.schedule_batch")  # all workers import it
