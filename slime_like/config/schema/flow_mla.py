"""rollout.flow_mla.*, and its conditions on an engine. The config rules and the engine's plugin use this module."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields

from slime_like.config.schema.base import Config, key, within
from slime_like.errors import ConfigError

VARIABLE = "SLIME_LIKE_FLOW_MLA"
"""Environment variable with the settings of an engine."""
MODULES: Mapping[str, tuple[str, ...]] = {
    "o_proj": ("o_proj",),
    "qkv_proj": ("qkv_proj",),
    "q_proj": ("q_b_proj", "q_proj"),
    "kv_b_proj": ("kv_b_proj",),
    "a_proj": ("fused_qkv_a_proj_with_mqa", "kv_a_proj_with_mqa"),
}
"""Map from values of ``rollout.flow_mla.weights`` to names of SGLang's modules. Latent attention has o_proj, q_proj, kv_b_proj
(with the weights that SGLang computes from it) and a_proj; other attention has o_proj and qkv_proj."""
LATENT_WEIGHTS = ("o_proj", "q_proj", "kv_b_proj", "a_proj")
PLAIN_WEIGHTS = ("o_proj", "qkv_proj")
DEFAULT_WEIGHTS = ("o_proj",)
TRANSPORTS = ("collective", "p2p")
PREFETCH_DISTANCE = 2
"""Default number of slots, the buffers for gathered layers. With N slots, layer i + N is loaded into the slot of layer i."""


@dataclass(kw_only=True)
class FlowMlaConfig(Config):
    """Attention weights sharded over the ranks of data-parallel attention."""

    enabled: bool = key(
        False,
        "Shard the attention weights over the ranks, which gather each layer shortly before it runs (docs/flow_mla.md).",
    )
    weights: list[str] = key(
        [*DEFAULT_WEIGHTS],
        "Projections to shard. With latent attention: any of o_proj, q_proj, kv_b_proj and a_proj; with other attention: o_proj, "
        "qkv_proj or both.",
    )
    prefetch_distance: int = key(
        PREFETCH_DISTANCE,
        "Number of buffers for gathered layers: with N, layer i is gathered when layer i - N ends.",
    )
    transport: str = key(
        TRANSPORTS[0],
        "Gather of a layer: collective (all-gathers of NCCL or gloo), or p2p (copies from the memory of "
        "the other ranks, by CUDA IPC or shared memory; they have to run on one machine).",
        choices=TRANSPORTS,
    )
    max_ctas: int | None = key(
        None,
        "Maximum thread blocks of a collective gather, each of which occupies a multiprocessor of the GPU; null: NCCL decides.",
    )

    def check(self, prefix: str) -> None:
        super().check(prefix)
        within(prefix, self, 2, 8, "prefetch_distance")
        within(prefix, self, 1, 64, "max_ctas")
        for name in self.weights:
            if name not in MODULES:
                raise ConfigError(
                    f"{prefix}weights has {name!r}, which is not one of {', '.join(MODULES)}: remove {name!r}"
                )
        if not self.weights or len(set(self.weights)) < len(self.weights):
            raise ConfigError(f"{prefix}weights={self.weights} is empty or has a name twice: set e.g. [o_proj]")
        default = type(self)()
        if not self.enabled and self != default:
            name = next(item.name for item in fields(self) if getattr(self, item.name) != getattr(default, item.name))
            raise ConfigError(
                f"{prefix}{name}={getattr(self, name)} has no effect with {prefix}enabled=false: set {prefix}enabled=true, or remove "
                f"{prefix}{name}"
            )
        if self.transport == "p2p" and self.max_ctas is not None:
            raise ConfigError(
                f"{prefix}max_ctas={self.max_ctas} with {prefix}transport=p2p, which has no collective gathers: remove {prefix}max_ctas"
            )


@dataclass(frozen=True, slots=True)
class FlowOptions:
    """FlowMLA settings of an engine."""

    weights: tuple[str, ...] = DEFAULT_WEIGHTS  # keys of MODULES
    prefetch_distance: int = PREFETCH_DISTANCE
    transport: str = TRANSPORTS[0]
    max_ctas: int | None = None

    def to_json(self) -> str:
        """Return the settings as the value of the environment variable ``VARIABLE``."""
        return json.dumps(asdict(self))


def from_json(text: str) -> FlowOptions:
    """Return the settings that ``to_json`` wrote."""
    values = json.loads(text)
    return FlowOptions(**(values | {"weights": tuple(values.get("weights", DEFAULT_WEIGHTS))}))


WHOLE_STEPS = "its kernels compute all layers of a step, without the hooks that wait for a layer's weights"
UNSUPPORTED_FIELDS: Mapping[str, tuple[object, str]] = {
    "attn_cp_size": (1, "not tested: its ranks would split a sequence"),
    "cpu_offload_gb": (
        0,
        "SGLang would copy a layer's weights between host and GPU, but a slot holds the weights of several layers in turn",
    ),
    "cuda_graph_backend_prefill": ("disabled", "not tested; graphs of decode steps are captured"),
    "custom_weight_loader": (
        None,
        "a loader that bypasses SGLang's loaders would write weights to a slot instead of a rank's part",
    ),
    "disaggregation_mode": ("null", "not tested"),
    "dwdp_size": (1, "its ranks run forwards on their own, and a gather needs all of them"),
    "elastic_ep_backend": (None, "a gather needs all ranks of the engine"),
    "enable_amd_monokernel": (False, WHOLE_STEPS),
    "enable_lora": (
        False,
        "adapters would be merged into weights, or computed with them, but each rank holds only a part",
    ),
    "enable_nvidia_megakernel": (False, WHOLE_STEPS),
    "enable_pdmux": (False, "prefill and decode would use the slots at the same time"),
    "enable_torch_compile": (False, "a compiled model runs without the hooks of its layers"),
    "enable_two_batch_overlap": (False, "SGLang runs the parts of a layer one by one, without the hooks of the layer"),
    "load_format": (
        "auto",
        "other formats bypass SGLang's loaders and would write weights to a slot instead of a rank's part",
    ),
    "offload_group_size": (-1, "SGLang's offloader replaces the weights of a layer at each forward"),
    "pp_size": (1, "not tested: each stage would have its own slots"),
    "quantization": (
        None,
        "SGLang would quantise or repack weights after loading them (a checkpoint in FP8 blocks needs no such option)",
    ),
    "remote_instance_weight_loader_start_seed_via_transfer_engine": (
        False,
        "other engines would copy the weights of a layer from a slot, which holds those of several layers in turn",
    ),
    "speculative_algorithm": (None, "the layers of the draft model would need slots of their own"),
    "startup_weight_load_mode": ("serial", "SGLang would capture graphs before the weights are loaded"),
    "weight_cache_mode": ("off", "processes would share weights, but each rank holds a different part"),
}
"""Map from fields of ServerArgs to the value that FlowMLA requires and the reason."""
P2P_FIELDS: Mapping[str, tuple[object, str]] = {
    "enable_memory_saver": (False, "memory that other ranks have mapped cannot be released"),
    "nnodes": (1, "ranks cannot read the memory of another machine"),
}
"""Fields of ServerArgs that ``transport=p2p`` requires in addition to ``UNSUPPORTED_FIELDS``."""
SKIP_VARIABLE = "SGLANG_SCHEDULER_SKIP_ALL_GATHER"
"""Environment variable that makes ranks skip forwards in which only other ranks have tokens."""
TRUE_VALUES = ("true", "1", "yes", "y")
"""Lower-case values of an environment variable that SGLang reads as true (tests/upstream compares them with SGLang)."""


def missing_weights(weights: Iterable[str], *, latent: bool) -> str | None:
    """Return the end of an error message that names the first of ``weights`` that the attention lacks; None if it has all."""
    available = LATENT_WEIGHTS if latent else PLAIN_WEIGHTS
    for name in weights:
        if name not in available:
            return f"has {name}, which the attention of this model does not have: choose from {', '.join(available)}"
    return None


def skips_forwards(environment: Mapping[str, str]) -> bool:
    """Return True if SGLang reads ``SKIP_VARIABLE`` in ``environment`` as true."""
    return environment.get(SKIP_VARIABLE, "").lower() in TRUE_VALUES


def required_values(transport: str) -> Mapping[str, tuple[object, str]]:
    """Return the fields of ServerArgs for which FlowMLA requires a value: a dict from field to that value and the reason."""
    return {**UNSUPPORTED_FIELDS, **(P2P_FIELDS if transport == "p2p" else {})}


def field_obstacle(field: str, value: object, transport: str = TRANSPORTS[0]) -> str | None:
    """Return why FlowMLA with ``transport`` rules out ``value`` for a field of ServerArgs; None if it does not.

    A ``value`` of None means SGLang's default.
    """
    requirements = required_values(transport)
    if field not in requirements:
        return None
    required, reason = requirements[field]
    return None if value in (required, None, False, []) else reason
