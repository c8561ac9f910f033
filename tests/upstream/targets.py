"""Put every hook and patch in place, in a process of its own, and print what does not fit: ``{name: problem or null}``.

``python -m tests.upstream.targets sglang`` (or ``megatron``, ``torch``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import torch

SEAMS = ("platform", "cpu", "exact", "rollout_sampling", "weight_commit", "hybrid", "dcp")
TOUCH_UPS = ("wrapper", "release")


def problem(put_in_place: Callable[[], object]) -> str | None:
    """Return what ``put_in_place`` raises, in words; None if it raises nothing. Hooks stop their process by SystemExit."""
    try:
        put_in_place()
    except (Exception, SystemExit) as error:  # noqa: BLE001 (fault boundary: the test shows it)
        return f"{type(error).__name__}: {error}"
    return None


def sglang() -> dict[str, str | None]:
    """Install each seam of the engine plugins."""
    from slime_like_plugins.rollout_sampling import hooks as sampling
    from slime_like_plugins.sglang_cpu import exact, process
    from slime_like_plugins.weight_commit import hooks as commit

    install = (platform, process.install, exact.install, sampling.install, commit.install, hybrid, dcp)
    return {seam: problem(put_in_place) for seam, put_in_place in zip(SEAMS, install, strict=True)}


def platform() -> None:
    """Have SGLang choose the platform as the environment says, and register its attention backends."""
    import sglang.srt.platforms as platforms

    chosen: Any = platforms.current_platform
    assert type(chosen).__name__ == "PlainCpu", f"SGLang chose {type(chosen).__name__}"
    chosen.init_backend()


class RadixLinearAttention(torch.nn.Module):
    """What tells ``hybrid.install`` that a model has linear attention."""


def hybrid() -> None:
    """Replace what hybrid models call Triton for, as an engine does; name every missing function, not only the first."""
    from slime_like_plugins.sglang_cpu.hybrid import install
    from slime_like_plugins.sglang_hooks import stop_on

    targets = [f"{module}:{name}" for module, name, _ in (*install.OF_MODELS, *install.REPLACED)]
    stop_on("hybrid", [text for name in targets if (text := problem(functools.partial(pkgutil.resolve_name, name)))])
    install.bind(RadixLinearAttention())


def dcp() -> None:
    """Install the hooks of decode context parallelism, and import its attention with the functions that it calls."""
    from slime_like_plugins.dcp import hooks

    hooks.install()
    for module in ("slime_like_plugins.dcp.attention", "sglang.srt.layers.dcp:cp_lse_ag_out_rs_mha"):
        pkgutil.resolve_name(module)


def patched_modules() -> list[str]:
    """Modules of megatron-core that are patched on a host."""
    from slime_like.train.megatron.platform import cpu_patches, patches

    return sorted({*patches.table(), *cpu_patches.PATCHES})


def megatron() -> dict[str, str | None]:
    """Import each module that is patched: its patches run after its body."""
    from slime_like.train.megatron.platform import host

    host.install("cpu")
    found = {name: problem(lambda n=name: importlib.import_module(n)) for name in patched_modules()}
    return {**found, "every patch": problem(host.verify)}


def of_torch() -> dict[str, str | None]:
    """Put the wrapper round torch's collectives, without and with communicators that come and go, and take it away."""
    from slime_like.config.schema.guard_policy import GuardSpec
    from slime_like.distributed.wrapper import install

    def place(release: bool) -> None:
        install.install(GuardSpec(wrap=True, release=release), torch.device("cpu"), 0)
        install.remove()

    return {name: problem(lambda r=name == "release": place(r)) for name in TOUCH_UPS}


def main() -> None:
    """Print the findings of one upstream package as the last line."""
    check: dict[str, Callable[[], dict[str, Any]]] = {"sglang": sglang, "megatron": megatron, "torch": of_torch}
    with contextlib.redirect_stdout(sys.stderr):
        found = check[sys.argv[1]]()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
