"""SGLang on a plain CPU: an out-of-tree platform with batched attention and a fused forward.

SGLang's in-tree CPU engine needs a kernel package built from source. On an out-of-tree platform, every op uses its
torch-native forward instead; this package supplies the rest. Decoding, where a run spends most of its time, has leaf kernels
in plain C that is compiled on the machine (``csrc``, ``build``), and equivalents in torch (``kernels``). Batches that the
kernels do not support go through SGLang's own forward. Inactive unless ``SLIME_LIKE_SGLANG`` names ``cpu``.
"""

from __future__ import annotations

from slime_like_plugins.plugin_names import CPU, EXACT
from slime_like_plugins.sglang_hooks import enabled, record_loaded


def activate() -> str | None:
    """Entry point ``sglang.srt.platforms``: return the dotted path of the platform class, or ``None`` if the plugin is off."""
    return "slime_like_plugins.sglang_cpu.platform.PlainCpu" if enabled(CPU) else None


def load() -> None:
    """Entry point ``sglang.srt.plugins``, called in every SGLang process before its arguments are checked."""
    if enabled(CPU):
        from slime_like_plugins.sglang_cpu import memory, process

        process.install()
        memory.install()
        record_loaded(CPU)
        if enabled(EXACT):
            from slime_like_plugins.sglang_cpu import exact

            exact.install()
            record_loaded(EXACT)
