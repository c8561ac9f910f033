"""SGLang on a CPU: an out-of-tree platform with batched attention and a fused forward.

SGLang's in-tree CPU engine needs a kernel package built from source. On an out-of-tree platform, every op uses its
torch-native forward instead; this package supplies the rest. For decoding, where a run spends most of its time, it has
kernels in C, which are compiled on the machine (``csrc``, ``build``), and equivalents in torch; ``kernels`` calls both.
Batches that the kernels do not support go through SGLang's own forward. The platform is inactive unless
``SLIME_LIKE_SGLANG`` names ``cpu``.
"""

from __future__ import annotations

from slime_like_plugins.plugin_names import CPU, EXACT
from slime_like_plugins.sglang_hooks import enabled, record_loaded


def activate() -> str | None:
    """Return the dotted path of the platform class if ``SLIME_LIKE_SGLANG`` names ``cpu``, else None.

    SGLang calls this function to find its platform (entry point ``sglang.srt.platforms``).
    """
    return "slime_like_plugins.sglang_cpu.platform.PlainCpu" if enabled(CPU) else None


def load() -> None:
    """Install the hooks of ``cpu`` if ``SLIME_LIKE_SGLANG`` names it, and those of ``exact`` if it names both.

    SGLang calls this function in every process before it checks its arguments (entry point ``sglang.srt.plugins``).
    Raises ``SystemExit`` if a hook does not fit SGLang, or if the memory limit of a rank is not a number of bytes.
    """
    if enabled(CPU):
        from slime_like_plugins.sglang_cpu import memory, process

        process.install()
        memory.install()
        record_loaded(CPU)
        if enabled(EXACT):
            from slime_like_plugins.sglang_cpu import batch_invariant_hooks

            batch_invariant_hooks.install()
            record_loaded(EXACT)
