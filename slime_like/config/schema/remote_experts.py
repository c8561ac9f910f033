"""rollout.remote_experts.*, and its conditions on an engine.

The config rules and the engine's plugin use this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from slime_like.config.schema.base import Config, key, positive, within
from slime_like.errors import ConfigError

VARIABLE = "SLIME_LIKE_REMOTE_EXPERTS"
"""Environment variable with the settings of an engine."""
MODES = ("auto", "batched", "stream")
TRANSPORTS = ("auto", "shared", "socket")
POLICIES = ("required", "fallback", "respawn")
PAYLOAD_DTYPES = ("float32", "float16", "bfloat16")
CAPACITY, MAX_CAPACITY = 1024, 4096
DEADLINE_S = 30.0
MIN_KEY_LENGTH = 16  # characters of the key of running workers


@dataclass(kw_only=True)
class RemoteExpertsConfig(Config):
    """Remote experts: in each layer, the routed experts that worker processes hold in memory and compute for the engine."""

    count: int = key(
        0,
        "Number of routed experts per layer in a worker process: the last ones, or with load_file those with the least load; "
        "0: none (docs/remote_experts.md).",
    )
    experts: list[int] = key([], "Ids of the remote experts of every layer, instead of count.")
    load_file: str | None = key(
        None,
        "JSON file with the number of tokens of each expert, as written by record_load: the count experts with the fewest tokens in "
        "each layer are remote.",
    )
    record_load: str | None = key(
        None,
        "JSON file to which an engine writes the number of tokens of each expert at every weight push; null: none.",
    )
    mode: str = key(
        "auto",
        "Size of the requests to a worker. batched: up to capacity tokens; stream: up to 32; auto: batched while the worker keeps "
        "up, otherwise the mode with more tokens per second.",
        choices=MODES,
    )
    transport: str = key(
        "auto",
        "Transport of hidden states and weights. shared: memory shared with a worker on the same machine; socket; auto: shared if "
        "possible.",
        choices=TRANSPORTS,
    )
    capacity: int = key(CAPACITY, "Maximum number of tokens of a request to a worker, 1 to 4096.")
    payload_dtype: str = key(
        "float32", "Dtype in which hidden states and results are sent to and from a worker.", choices=PAYLOAD_DTYPES
    )
    policy: str = key(
        "required",
        "Action if a worker ends or misses a deadline. required: the engine ends, and is restarted like any lost engine; "
        "fallback: the engine computes the experts itself; respawn: a new worker gets the weights. The last two keep a copy of "
        "the weights in host memory.",
        choices=POLICIES,
    )
    deadline_s: float = key(DEADLINE_S, "Time limit of a request to a worker in seconds.")
    workers: list[str] = key(
        [], "Addresses HOST:PORT of running workers, one per rank of every engine; empty: each rank starts one."
    )
    key_file: str | None = key(
        None, "File with the key of the running workers; only the file's owner may have permission to read it."
    )
    threads: int = key(1, "Threads of a worker that a rank starts.")
    device: str = key("cpu", "Device of a worker that a rank starts, such as cpu or cuda:1.")
    shared_bytes: int = key(0, "Size of the memory shared with each worker in bytes; 0: enough for 4 requests.")

    @property
    def enabled(self) -> bool:
        """Return whether any experts are remote."""
        return self.count > 0 or bool(self.experts)

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "deadline_s", "threads")
        within(prefix, self, 1, MAX_CAPACITY, "capacity")
        if problem := placement_problem(self.count, self.experts, self.load_file):
            raise ConfigError(f"{prefix}{problem}")
        if bool(self.workers) != bool(self.key_file):
            raise ConfigError(
                f"{prefix}workers={self.workers} and {prefix}key_file={self.key_file!r}: running workers and their key are set "
                f"together; set both, or remove {prefix}{'workers' if self.workers else 'key_file'}"
            )
        if problem := _workers_problem(self.workers):
            raise ConfigError(f"{prefix}workers={self.workers}: {problem}")
        if self.shared_bytes < 0:
            raise ConfigError(f"{prefix}shared_bytes={self.shared_bytes} must be at least 0")
        default = type(self)()
        if not self.enabled and self != default:
            name = next(item.name for item in fields(self) if getattr(self, item.name) != getattr(default, item.name))
            raise ConfigError(
                f"{prefix}{name}={getattr(self, name)} has no effect without remote experts: set {prefix}count, or remove "
                f"{prefix}{name}"
            )


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``. Raises ``ConfigError`` on other text."""
    host, separator, port = text.rpartition(":")
    if not (host and separator and port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f"address {text!r} of a worker is not HOST:PORT, such as 127.0.0.1:7100")
    return host.strip("[]"), int(port)


def _workers_problem(workers: list[str]) -> str:
    """Return why ``workers`` cannot be the addresses of different workers; "" if they can. No worker is contacted."""
    try:
        addresses = [parse_address(text) for text in workers]
    except ConfigError as error:
        return str(error)
    if any(port == 0 for _, port in addresses):
        return "port 0 is not a valid port: set the port that the worker prints when it starts to listen"
    if len({*addresses}) < len(addresses):
        return "an address occurs twice, but a worker serves one rank: start a worker for each"
    return ""


def placement_problem(count: int, experts: list[int], load_file: str | None) -> str:
    """Return why these settings are invalid or exclude each other; empty if they are valid."""
    if count < 0:
        return f"count={count} must be at least 0"
    if experts and (count or load_file):
        return f"experts={experts} excludes count and load_file: remove experts, or remove count and load_file"
    if load_file and not count:
        return f"load_file={load_file!r} needs count, the number of remote experts per layer: set count, or remove load_file"
    if len(set(experts)) < len(experts) or min(experts, default=0) < 0:
        return f"experts={experts} has a negative or a repeated id: remove that id"
    return ""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Remote-expert settings of an engine, with the meanings documented in ``RemoteExpertsConfig``."""

    count: int = 0
    experts: tuple[int, ...] = ()
    load_file: str = ""
    record_load: str = ""
    mode: str = "auto"
    transport: str = "auto"
    capacity: int = CAPACITY
    payload_dtype: str = "float32"
    policy: str = "required"
    deadline_s: float = DEADLINE_S
    workers: tuple[str, ...] = ()
    key_file: str = ""
    threads: int = 1
    device: str = "cpu"
    shared_bytes: int = 0

    def to_json(self) -> str:
        """Return the settings as the value of the environment variable ``VARIABLE``."""
        return json.dumps(asdict(self))


def from_json(text: str) -> RemoteOptions:
    """Return the settings that ``to_json`` wrote."""
    values: dict[str, Any] = json.loads(text)
    lists: dict[str, Any] = {name: tuple(values[name]) for name in ("experts", "workers") if name in values}
    return RemoteOptions(**(values | lists))


UNSUPPORTED_FIELDS: Mapping[str, tuple[object, str]] = {
    "cpu_offload_gb": (0, "SGLang would move weights between the host and the GPU during a forward"),
    "custom_weight_loader": (None, "it may write weights without SGLang's loaders, so that the worker would miss them"),
    "disaggregation_mode": ("null", "not tested"),
    "dwdp_size": (1, "its ranks exchange whole layers of experts"),
    "elastic_ep_backend": (None, "it moves experts between ranks"),
    "enable_eplb": (False, "it moves experts between ranks"),
    "enable_lora": (False, "adapters would be merged into weights, but the worker has a part of them"),
    "enable_paged_experts": (False, "it replaces the same function"),
    "enable_pdmux": (False, "prefill and decode would use the connection at the same time"),
    "enable_torch_compile": (False, "a request to a worker cannot be compiled"),
    "enable_two_batch_overlap": (False, "two batches would use the connection at the same time"),
    "ep_num_redundant_experts": (0, "it moves experts between ranks"),
    "ep_size": (1, "experts are divided over ranks already"),
    "kt_weight_path": (None, "it replaces the same function"),
    "load_format": ("auto", "other formats write weights without SGLang's loaders, so that the worker would miss them"),
    "moe_a2a_backend": ("none", "experts are divided over ranks already"),
    "offload_group_size": (-1, "SGLang's offloader replaces the weights of a layer at each forward"),
    "pp_size": (1, "not tested"),
    "quantization": (None, "a worker computes with weights that are not quantised"),
    "speculative_algorithm": (None, "the experts of the draft model would need a worker of their own"),
    "startup_weight_load_mode": ("serial", "SGLang would start before the worker has the weights"),
    "weight_cache_mode": ("off", "processes would share weights, but each lacks a part of them"),
}
"""Map from fields of ServerArgs to the value that remote experts require and the reason."""


def field_obstacle(field: str, value: object) -> str | None:
    """Return why remote experts rule out ``value`` for a field of ServerArgs; None if they do not.

    A ``value`` of None means SGLang's default.
    """
    if field not in UNSUPPORTED_FIELDS:
        return None
    required, reason = UNSUPPORTED_FIELDS[field]
    return None if value in (required, None, False, []) else reason
