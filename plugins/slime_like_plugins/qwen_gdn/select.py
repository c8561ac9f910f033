"""Which backend a rank runs: resolved once per process, logged, never another one than was asked for."""

from __future__ import annotations

import functools
import logging
from typing import cast

from slime_like.config.gdn import GDNConfig, gdn_backend
from slime_like.config.names import GDN_BACKENDS
from slime_like.registry import resolve as resolve_name
from slime_like_plugins.qwen_gdn.backend import GDNBackend

log = logging.getLogger(__name__)


def resolve(config: GDNConfig, device: str) -> GDNBackend:
    """The kernels of ``model.gdn`` on ``device`` (cpu or cuda); the same object for every layer of a process.

    Raises ``ConfigError`` naming the key where the backend cannot run here.
    """
    return _backend(gdn_backend(config.backend, device))


@functools.cache
def _backend(name: str) -> GDNBackend:
    found = cast("GDNBackend", resolve_name("model.gdn.backend", name, GDN_BACKENDS)())
    log.info("Gated DeltaNet runs on model.gdn.backend=%s: %s", found.name, found.kernels())
    return found
