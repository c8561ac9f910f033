"""Environment of an engine's process: variables that torch, SGLang and the SGLang plugins read."""

from __future__ import annotations

import math
import os

from slime_like.config.schema import flow_mla, remote_experts
from slime_like.config.schema.rank_memory import VARIABLE as RANK_MEMORY
from slime_like.config.schema.rank_memory import rank_memory
from slime_like.config.schema.resolved import EngineSpec
from slime_like.errors import ConfigError, EngineError
from slime_like.rollout.engine.cuda_toolkit import library_environment, toolkit_environment
from slime_like.rollout.engine.model_config import is_quantised, other_models
from slime_like.rollout.engine.node import RENDEZVOUS_SCHEME, SINGLE_NODE, EngineNode
from slime_like.rollout.engine.plugins import WHITELIST, extended_whitelist
from slime_like.util.deadline import scale
from slime_like.util.ports import interface_environment

LOOPBACK = "127.0.0.1"
SGLANG_PLUGINS = "SLIME_LIKE_SGLANG"  # comma-separated plugins to activate (slime_like_plugins.sglang_hooks)
# Number of spins of a libgomp thread after a parallel region, before it sleeps: about 0.03 ms. Decoding opens hundreds
# of regions per token, a few microseconds apart; waking a thread for each costs more than two threads gain. With a
# higher count, spinning threads would occupy the core that the scheduler, the detokenizer and the server share.
SPIN_COUNT = "2000"
SPIN = "SLIME_LIKE_ENGINE_SPIN_COUNT"  # overrides SPIN_COUNT, to measure it (benchmarks/run.py spin)
THREADS = "SLIME_LIKE_ENGINE_THREADS"  # number of threads that compute a model on a CPU
CPU_KERNELS = "SLIME_LIKE_CPU_KERNELS"
# Without these, a server whose worker died waits five seconds for GPU state dumps before it exits.
NO_CRASH_DUMPS = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}


def child_environment(
    spec: EngineSpec, scratch: str, host: str = LOOPBACK, node: EngineNode = SINGLE_NODE
) -> dict[str, str]:
    """Return the environment of an engine's server; ``scratch`` is a private folder for its temporary files and sockets.

    Raises ``ConfigError`` if ``RANK_MEMORY`` is not a number of bytes above 0 or is set for an engine on GPUs; ``EngineError`` if
    ``SPIN`` is not a number for an engine on a CPU; and the errors of ``interface_environment`` and ``toolkit_environment``.
    """
    environment = {**interface_environment(host), **os.environ}
    if rank_memory() is not None and spec.device != "cpu":
        raise ConfigError(
            f"{RANK_MEMORY}={os.environ[RANK_MEMORY]} has no effect with placement.device={spec.device}, whose engines have the memory "
            f"of a GPU: unset {RANK_MEMORY}"
        )
    plugins = ["weight_commit", "rollout_sampling", "kv_usage"]
    if is_quantised(spec.model_path) and not spec.float8:
        plugins.append("dequantise")
    if spec.dcp > 1:
        plugins.append("dcp")
    if spec.flow_mla:
        plugins.append("flow_mla")
        environment[flow_mla.VARIABLE] = spec.flow_mla
    if spec.remote_experts:
        plugins.append("remote_experts")
        environment[remote_experts.VARIABLE] = spec.remote_experts
    if spec.admits_by_kv:
        plugins.append("kv_admission")
        # SGLang's default reserves at most 4096 tokens.
        environment["SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"] = str(spec.context_length)
    if spec.device == "cpu":
        plugins.insert(0, "cpu")
        if spec.deterministic:
            plugins.append("exact")
            environment["SGLANG_ENABLE_FAST_INPUT_LOGPROBS"] = "0"  # score by log-softmax, as in sampling
        environment |= {"SGLANG_PLATFORM": "slime_like_cpu", "CUDA_VISIBLE_DEVICES": "", CPU_KERNELS: spec.cpu_kernels}
        environment["TORCHDYNAMO_DISABLE"] = "1"  # compiling a few small functions takes seconds and a C++ compiler
        # The server has one thread until the workers start, so that it can fork; the model's worker restores the count.
        environment[THREADS] = environment.get("OMP_NUM_THREADS", "1")
        environment["OMP_NUM_THREADS"] = "1"
        environment["GOMP_SPINCOUNT"] = spin_count()
        environment = NO_CRASH_DUMPS | environment
    else:
        plugins.append("kv_size")
        environment |= toolkit_environment(environment)
        if spec.releases_memory:
            environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"  # without it, a release leaves CUDA graphs in memory
            # SGLang preloads torch_memory_saver, which needs CUDA's runtime.
            environment |= library_environment(environment)
    environment |= {
        SGLANG_PLUGINS: ",".join(plugins),
        WHITELIST: extended_whitelist(os.environ.get(WHITELIST, "")),
        "SGLANG_MAMBA_CONV_DTYPE": spec.dtype,  # convolution states of hybrid models; SGLang's default is bfloat16
        "TMPDIR": scratch,
        **_health_environment(spec.health_timeout_s),
        "SGLANG_TIMEOUT_KEEP_ALIVE": "600",  # longer than that of the client, which reuses connections
        **_rendezvous_environment(scratch, host, node),
    }
    if os.path.isdir(spec.model_path):
        environment |= {"HF_HUB_OFFLINE": "1", "SGLANG_DISABLED_MODEL_ARCHS": ",".join(other_models(spec.model_path))}
    return environment


def _health_environment(seconds: float) -> dict[str, str]:
    """Return the environment variables of SGLang's health checks for a client that waits at most ``seconds`` for each."""
    return {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health answers without decoding a token
        # /health_generate waits longer than the client, whose limit then applies; SGLang's own is 20 s.
        "SGLANG_HEALTH_CHECK_TIMEOUT": str(math.ceil(seconds * scale()) + 1),
    }


def _rendezvous_environment(scratch: str, host: str, node: EngineNode) -> dict[str, str]:
    """Return the variables for the ranks' rendezvous; on several nodes also those that limit who can connect to the ranks."""
    method = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
    if not node.rendezvous:
        return {method: f"file://{scratch}/rendezvous"}  # no port that other users can connect to
    return {
        method: f"{RENDEZVOUS_SCHEME}://{node.rendezvous}",
        "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "false",  # objects are sent through gloo instead of another listener
        "SGLANG_HOST_IP": host,
        "SGLANG_ZMQ_SOURCE_IP": host,
        "SGLANG_ZMQ_ALLOWED_PEERS": ",".join(node.hosts),  # sockets of data-parallel attention refuse other addresses
    }


def spin_count() -> str:
    """Return the spin count of an engine's threads, as set in the environment variable ``SPIN``, else ``SPIN_COUNT``.

    Raises ``EngineError`` if the variable is not a number; libgomp would ignore such a value.
    """
    num_spins = os.environ.get(SPIN, SPIN_COUNT)
    if not num_spins.isdecimal():
        raise EngineError(
            f"{SPIN}={num_spins!r} is not a number of spins: set it to a number such as {SPIN_COUNT}, or unset {SPIN}"
        )
    return num_spins
