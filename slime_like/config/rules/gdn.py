"""Requirements of Gated DeltaNet backends for model and machine, checked at load, in the plan and on each rank."""

from __future__ import annotations

from slime_like.config.rules.gdn_runtime import Runtime, Version, runtime
from slime_like.config.rules.hf import GDNShape, HfConfig
from slime_like.config.schema.gdn import GDNConfig, gdn_backend
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.util.gpus import visible_gpus

FLASHQLA_DIM = 128
FLA_MAX_DIM = 256
FLA_CAPABILITY = (8, 0)
FLASHQLA_VALIDATED = ((9, 0), (10, 0), (10, 3))
FLASHQLA_UNVALIDATED = ((12, 0), (12, 1))  # kernels exist, but have not been compared with a reference there
NEEDS: dict[str, dict[str, Version]] = {
    "fla": {"torch": (2, 7), "triton": (3, 3), "fla-core": (0, 6, 0)},
    # flash-qla before 0.1.3 has wrong gradients of g under strong decay. fla-core provides the convolution.
    "flashqla": {"torch": (2, 8), "flash-qla": (0, 1, 3), "tilelang": (0, 1, 12), "fla-core": (0, 6, 0)},
}
FLASHQLA_CUDA = (12, 8)
INSTALL = "SLIME_LIKE_DEVICE=gpu bash scripts/setup.sh installs the versions of scripts/requirements/gpu.lock"
ANYWHERE = "set model.gdn.backend=torch (--qwen-gdn-backend torch), which runs anywhere"


def check_gdn(cfg: TrainConfig, *, machine: bool = True) -> None:
    """Raise ``ConfigError`` on settings of ``model.gdn`` that can be rejected before the model is read.

    With ``machine=False`` or ``placement.ray_address``, this machine is not checked, because the run may be on others. It is
    not checked either with ``run.mode=rollout_only``, which trains no layers.
    """
    config = cfg.model.gdn
    check_options(config, deterministic=cfg.run.deterministic)
    # Cluster nodes may differ from this machine, so each rank checks its own node.
    is_other_machine = not machine or cfg.placement.ray_address is not None
    if config.backend == "auto" or cfg.run.mode == "rollout_only" or is_other_machine:
        return
    gpus = () if cfg.placement.device == "cpu" else visible_gpus()
    device = cfg.placement.device if cfg.placement.device != "auto" else "cuda" if gpus else "cpu"
    check_runtime(config, runtime(device, gpus[0].capability if gpus else None), cfg.model.dtype, None)


def check_has_gdn(config: GDNConfig, model: HfConfig) -> None:
    """Raise ``ConfigError`` if a backend was chosen for a model without Gated DeltaNet layers."""
    if config.backend != "auto" and model.gdn is None:
        raise ConfigError(
            f"model.gdn.backend={config.backend} with the model in {model.folder}, which has no Gated DeltaNet layers "
            "(linear_num_value_heads in its config.json): remove model.gdn.backend"
        )


def check_optimizer(cfg: TrainConfig, model: HfConfig, dtype: str) -> None:
    """Raise ``ConfigError`` if Megatron could not save the optimizer of Gated DeltaNet layers.

    In bfloat16, their decay parameters stay in float32, and Megatron's plain optimizer confuses the two dtypes.
    """
    if model.gdn is not None and dtype == "bfloat16" and not cfg.parallel.distributed_optimizer:
        raise ConfigError(
            "parallel.distributed_optimizer=false with Gated DeltaNet layers in bfloat16, whose decays stay in float32: "
            "megatron-core's plain optimizer confuses the two dtypes in checkpoints; set parallel.distributed_optimizer=true"
        )


def check_options(config: GDNConfig, *, deterministic: bool) -> None:
    """Raise ``ConfigError`` if options of ``model.gdn`` contradict each other or ``run.deterministic``."""
    for name, is_set in (("auto_cp", config.auto_cp), ("allow_unvalidated", config.allow_unvalidated)):
        if is_set and config.backend != "flashqla":
            raise ConfigError(
                f"model.gdn.{name}=true with model.gdn.backend={config.backend}: only flashqla reads it; remove model.gdn.{name}"
            )
    if config.auto_cp and deterministic:
        raise ConfigError(
            "model.gdn.auto_cp=true with run.deterministic=true: FlashQLA's split of a sequence depends on the sequences "
            "packed with it; remove model.gdn.auto_cp"
        )


def check_runtime(config: GDNConfig, machine: Runtime, dtype: str, shape: GDNShape | None) -> None:
    """Raise ``ConfigError``, with reason and fix, if the chosen kernels cannot run.

    ``config.backend`` may be auto, and so may ``dtype``, which is then bfloat16 on a GPU. ``shape`` is None while it is unknown.
    """
    name = gdn_backend(config.backend, machine.device)
    if name not in NEEDS:  # the backend runs anywhere, or checks its requirements when it is constructed
        return
    setting = f"model.gdn.backend={name}"
    if machine.device != "cuda":
        kind = "FlashQLA's TileLang" if name == "flashqla" else "fla's Triton"
        raise ConfigError(f"{setting} on a CPU: {kind} kernels run on NVIDIA GPUs only; {ANYWHERE}")
    if name == "flashqla":
        _check_flashqla(config, machine, dtype, shape)
    else:
        _check_fla(machine, shape)
    for package, minimum in NEEDS[name].items():
        version = machine.versions.get(package)
        if version is None or version < minimum:
            state = "is not installed" if version is None else f"{_dots(version)} is installed"
            raise ConfigError(f"{setting} needs {package} >= {_dots(minimum)}, which {state}: {INSTALL}; or {ANYWHERE}")


def _check_fla(machine: Runtime, shape: GDNShape | None) -> None:
    if machine.capability is not None and machine.capability < FLA_CAPABILITY:
        raise ConfigError(
            f"model.gdn.backend=fla on a GPU of compute capability {_dots(machine.capability)}: fla's kernels need "
            f"{_dots(FLA_CAPABILITY)} (Ampere) or newer; {ANYWHERE}"
        )
    if shape is not None and shape.key_dim > FLA_MAX_DIM:
        raise ConfigError(
            f"model.gdn.backend=fla with linear_key_head_dim={shape.key_dim}: fla's kernels support at most {FLA_MAX_DIM} per "
            f"head; {ANYWHERE}"
        )


def _check_flashqla(config: GDNConfig, machine: Runtime, dtype: str, shape: GDNShape | None) -> None:
    setting, fix = "model.gdn.backend=flashqla", "set model.gdn.backend=fla (--qwen-gdn-backend fla)"
    if machine.capability is not None and machine.capability not in FLASHQLA_VALIDATED:
        location = f"{setting} on a GPU of compute capability {_dots(machine.capability)}"
        if machine.capability not in FLASHQLA_UNVALIDATED:
            supported = ", ".join(_dots(c) for c in FLASHQLA_VALIDATED)
            raise ConfigError(f"{location}: FlashQLA has kernels for {supported} (Hopper, B200, B300); {fix}")
        if not config.allow_unvalidated:
            raise ConfigError(
                f"{location}: FlashQLA has kernels for it that have not been validated here; {fix}, or "
                "model.gdn.allow_unvalidated=true after `python benchmarks/gdn.py` has shown parity"
            )
    if machine.cuda is None or machine.cuda < FLASHQLA_CUDA:
        build_text = "without CUDA" if machine.cuda is None else f"for CUDA {_dots(machine.cuda)}"
        raise ConfigError(
            f"{setting} needs CUDA >= {_dots(FLASHQLA_CUDA)}, but torch was built {build_text}: {INSTALL}; or {fix}"
        )
    if dtype not in ("auto", "bfloat16"):
        raise ConfigError(
            f"{setting} with model.dtype={dtype}: FlashQLA supports 16-bit dtypes only; set model.dtype=bfloat16, or {fix}"
        )
    for part, size in (("key", shape.key_dim), ("value", shape.value_dim)) if shape is not None else ():
        if size != FLASHQLA_DIM:
            raise ConfigError(
                f"{setting} with linear_{part}_head_dim={size}: FlashQLA supports {FLASHQLA_DIM} only; {fix}"
            )
    if not machine.nvcc:
        raise ConfigError(
            f"{setting}: TileLang compiles its kernels with nvcc, which is neither on PATH nor under CUDA_HOME: install the "
            f"CUDA toolkit >= {_dots(FLASHQLA_CUDA)}, or {fix}"
        )


def _dots(numbers: Version) -> str:
    return ".".join(map(str, numbers))
