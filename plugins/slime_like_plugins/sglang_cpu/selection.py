"""Choice of the leaf kernels that this engine decodes with, made once per process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

from slime_like_plugins.sglang_cpu import EXACT, OPTION
from slime_like_plugins.sglang_cpu.build import BuildError, build
from slime_like_plugins.sglang_cpu.kernels import CKernels, TorchKernels
from slime_like_plugins.sglang_hooks import enabled

CHOICES = ("auto", "c", "torch", "off")


@dataclass(frozen=True, slots=True)
class Selection:
    """``leaf`` is ``None`` where SGLang's own forward decodes; ``c`` is set where the C kernels are in use."""

    leaf: CKernels | TorchKernels | None
    text: str

    @property
    def c(self) -> CKernels | None:
        """The C kernels, if chosen."""
        return self.leaf if isinstance(self.leaf, CKernels) else None


def choose(option: str) -> Selection:
    """The kernels for ``wanted``. Raises ``SystemExit`` if C is required and cannot be compiled."""
    if option not in CHOICES:
        raise SystemExit(f"slime_like plugin 'cpu': {OPTION}={option!r} is not one of {', '.join(CHOICES)}")
    if option == "off":
        return Selection(None, "SGLang's own forward")
    if option == "torch":
        return Selection(TorchKernels(), "torch kernels")
    try:
        built = build()
        return Selection(CKernels(built.path), f"C kernels ({built.compiler})")
    except (BuildError, OSError) as error:
        if option == "c":
            raise SystemExit(f"slime_like plugin 'cpu': rollout.cpu_kernels=c: {error}; or set it to auto") from error
        return Selection(TorchKernels(), f"torch kernels, no C kernels: {error}")


@cache
def selected() -> Selection:
    """Return the selection of this process."""
    from sglang.srt.runtime_context import get_exec

    deterministic = get_exec().deterministic
    if enabled(EXACT):
        return Selection(None, "SGLang's own forward (bits that do not depend on the batch)")
    if deterministic.enable_deterministic_inference or deterministic.rl_on_policy_target is not None:
        return Selection(None, "SGLang's own forward (deterministic inference)")
    return choose(os.environ.get(OPTION, "auto"))
