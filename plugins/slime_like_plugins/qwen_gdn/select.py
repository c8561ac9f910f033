"""Choice of a rank's backend, validated before its package is imported. There is no fallback to another backend."""

from __future__ import annotations

import functools
from typing import cast

import torch

from slime_like.config.rules.gdn import check_runtime
from slime_like.config.rules.gdn_runtime import runtime
from slime_like.config.rules.hf import GDNShape
from slime_like.config.schema.gdn import GDNConfig, gdn_backend
from slime_like.config.schema.names import GDN_BACKENDS
from slime_like.errors import ConfigError
from slime_like.registry import check
from slime_like.registry import resolve as resolve_name
from slime_like_plugins.qwen_gdn.backend import GDNBackend


def resolve(config: GDNConfig, device: str, dtype: str = "auto", shape: GDNShape | None = None) -> GDNBackend:
    """Return the backend of ``model.gdn`` for ``device`` (cpu or cuda), the same object for all layers of a process.

    ``dtype`` (auto, float32, bfloat16) and ``shape`` are the model's. Raises ``ConfigError``, with the reason and a remedy, if
    the name is not registered, a requirement is not met (before the package is imported), or the import or constructor fails.
    """
    name = gdn_backend(config.backend, device)
    check("model.gdn.backend", name, GDN_BACKENDS)
    capability = torch.cuda.get_device_capability() if device == "cuda" and torch.cuda.is_available() else None
    check_runtime(config, runtime(device, capability), dtype, shape)
    return _backend(name, bool(config.auto_cp))


@functools.cache
def _backend(name: str, auto_cp: bool) -> GDNBackend:
    try:
        backend = resolve_name("model.gdn.backend", name, GDN_BACKENDS)
        return cast("GDNBackend", backend(GDNConfig(backend=name, auto_cp=auto_cp)))
    except (ImportError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"model.gdn.backend={name}: its package is installed but cannot be imported "
            f"({type(error).__name__}: {error}); model.gdn.backend=torch runs on any machine"
        ) from error
