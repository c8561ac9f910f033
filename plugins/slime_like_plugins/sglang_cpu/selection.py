"""Selection of an engine's kernels (``kernels.py``), once per process: in C, in torch, or none (SGLang's own forward)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

from slime_like_plugins.plugin_names import CPU_KERNELS_VARIABLE, EXACT
from slime_like_plugins.sglang_cpu.build import BuildError, build
from slime_like_plugins.sglang_cpu.kernels import CKernels, TorchKernels
from slime_like_plugins.sglang_hooks import enabled

CHOICES = ("auto", "c", "torch", "off")
WIDE_LATENT = 512
"""Width of a latent from which ``auto`` attends in torch: C is slower at contexts of 2048 tokens.

The measurements are in docs/measurements/decode_cpu.md.
"""


@dataclass(frozen=True, slots=True)
class Selection:
    """Selected kernels, and a description. ``leaf`` is None if SGLang's own forward runs instead."""

    leaf: CKernels | TorchKernels | None
    text: str

    @property
    def c(self) -> CKernels | None:
        """C kernels if they were selected, else None."""
        return self.leaf if isinstance(self.leaf, CKernels) else None


def choose(choice: str) -> Selection:
    """Return the kernels for ``choice``.

    Raises ``SystemExit`` if ``choice`` is unknown, or if it is ``c`` and the C kernels cannot be built or loaded.
    """
    if choice not in CHOICES:
        raise SystemExit(
            f"slime_like plugin 'cpu': {CPU_KERNELS_VARIABLE}={choice!r} is not one of {', '.join(CHOICES)}: set rollout.cpu_kernels"
        )
    if choice == "off":
        return Selection(None, "SGLang's own forward")
    if choice == "torch":
        return Selection(TorchKernels(), "torch kernels")
    try:
        built = build()
        return Selection(CKernels(built.path), f"C kernels ({built.compiler})")
    except (BuildError, OSError) as error:
        if choice == "c":
            raise SystemExit(
                f"slime_like plugin 'cpu': rollout.cpu_kernels=c: {error}; to decode with torch, set rollout.cpu_kernels=auto"
            ) from error
        return Selection(TorchKernels(), f"torch kernels, no C kernels: {error}")


def kernel_setting() -> str:
    """Return the choice of kernels in this process's environment, unchecked."""
    return os.environ.get(CPU_KERNELS_VARIABLE, "auto")


def latent_kernels(latent: int) -> CKernels | None:
    """Return the C kernels for decoding over latents of width ``latent``; None selects torch."""
    return None if kernel_setting() == "auto" and latent >= WIDE_LATENT else selected().c


@cache
def selected() -> Selection:
    """Return the kernels of this process, selected at the first call. Raises the ``SystemExit`` of ``choose``."""
    from sglang.srt.runtime_context import get_exec

    deterministic = get_exec().deterministic
    if enabled(EXACT):
        return Selection(None, "SGLang's own forward (batch-invariant)")
    if deterministic.enable_deterministic_inference or deterministic.rl_on_policy_target is not None:
        return Selection(None, "SGLang's own forward (deterministic inference)")
    return choose(kernel_setting())
