"""Install every hook and patch of upstream packages and print ``{package: {name: problem or null}}`` as JSON.

Run in a separate process: ``python -m tests.upstream.targets megatron torch`` (or ``sglang``, whose environment differs). Each
package has a fork of its own. If it fails, the value is its output.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from slime_like.util.imports import heavy_imports

with heavy_imports():
    import torch

    from slime_like.rollout.engine.sglang_imports import LOSSES, DeferredLosses, sglang_imports

HOOK_SETS = (
    "unused_libraries",
    "platform",
    "rank_memory",
    "cpu",
    "exact",
    "rollout_sampling",
    "weight_commit",
    "dequantise",
    "hybrid",
    "latent",
    "data_parallel",
    "expert_parallel",
    "dcp",
    "kv_capacity",
    "flow_mla",
    "remote_experts",
    "other_names",
)
WRAPPERS = ("wrapper", "release")
POOL = "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool"
READER = "sglang.srt.mem_cache.kv_index_translator:KVIndexTranslator"


def problem(install: Callable[[], object]) -> str | None:
    """Return the error that ``install`` raises as text, None without an error. Hooks stop their process by SystemExit."""
    try:
        install()
    except (Exception, SystemExit) as error:  # noqa: BLE001 (fault boundary: the test shows it)
        return f"{type(error).__name__}: {error}"
    return None


def sglang() -> dict[str, str | None]:
    """Install each set of hooks of the engine plugins; return the problem of each set, or None, by its name."""
    with sglang_imports():
        from slime_like_plugins.rollout_sampling import hooks as sampling
        from slime_like_plugins.sglang_cpu import batch_invariant_hooks, data_parallel, expert_parallel, process
        from slime_like_plugins.weight_commit import dequantise
        from slime_like_plugins.weight_commit import hooks as commit

        installers = (
            unused_libraries,
            platform,
            rank_memory,
            process.install,
            batch_invariant_hooks.install,
            sampling.install,
            commit.install,
            dequantise.install,
        )
        installers += (hybrid, latent, data_parallel.replace, expert_parallel.replace)
        installers += (dcp, kv_capacity, flow_mla, remote_experts)
        installers += (other_names,)
        return {name: problem(install) for name, install in zip(HOOK_SETS, installers, strict=True)}


def other_names() -> None:
    """Check that no module imports a hooked function under another name, which ``sglang_hooks.install`` does not replace.

    A class that a hook replaces is not checked, because the new class does not refer to the original.
    """
    registry: Any = pkgutil.resolve_name("sglang.srt.plugins.hook_registry:HookRegistry")
    originals: dict[int, str] = {}
    for target in registry._patched:
        if inspect.ismodule(pkgutil.resolve_name(target.rpartition(".")[0])):
            function = pkgutil.resolve_name(target)
            while (function := getattr(function, "__wrapped__", None)) is not None:
                originals[id(function)] = target
    assert originals, "no function is hooked"
    modules = [module for module in list(sys.modules.values()) if inspect.ismodule(module)]
    values = [(module.__name__, name, id(value)) for module in modules for name, value in list(vars(module).items())]
    aliases = [f"{module}.{name} is {originals[value]}" for module, name, value in values if value in originals]
    assert not aliases, f"imported under another name: {', '.join(aliases)}"


def platform() -> None:
    """Let SGLang choose the platform by the environment, and register the platform's attention backends."""
    import sglang.srt.platforms as platforms

    current_platform: Any = platforms.current_platform
    assert type(current_platform).__name__ == "PlainCpu", f"SGLang chose {type(current_platform).__name__}"
    current_platform.init_backend()


def rank_memory() -> None:
    """Install the hook that limits the memory of a rank, and check the functions by which SGLang reads it."""
    from slime_like.config.schema.rank_memory import VARIABLE
    from slime_like_plugins.sglang_cpu import memory

    os.environ[VARIABLE] = str(1 << 40)
    memory.install()
    common = pkgutil.resolve_name("sglang.srt.utils.common")
    assert common.get_available_gpu_memory("cpu", 0) == 1 << 10, "SGLang reads the memory of a rank in another way"
    del os.environ[VARIABLE]


class RadixLinearAttention(torch.nn.Module):
    """Module whose class name makes ``hybrid.install`` treat a model as one with linear attention."""


def hybrid() -> None:
    """Replace the Triton functions of hybrid models, as an engine does; the error names every missing function."""
    from slime_like_plugins.sglang_cpu.hybrid import install
    from slime_like_plugins.sglang_hooks import stop_on

    targets = [f"{module}:{name}" for module, name, _ in (*install.OF_MODELS, *install.REPLACED)]
    stop_on("hybrid", [text for name in targets if (text := problem(functools.partial(pkgutil.resolve_name, name)))])
    install.bind(RadixLinearAttention())
    chunks = pkgutil.resolve_name("sglang.kernels.ops.attention.fla.chunk_delta_h:CHUNK_SIZE")
    assert chunks == install.delta_rule.STATE_CHUNK, f"SGLang keeps a state every {chunks} tokens"


def latent() -> None:
    """Import attention over latents; the platform has replaced the rotary embedding."""
    pkgutil.resolve_name("slime_like_plugins.sglang_cpu.latent_attention")


def dcp() -> None:
    """Install the hooks of decode context parallelism, and import its attention with the functions that it calls."""
    from slime_like_plugins.dcp import hooks

    hooks.install()
    hooks.register_flashinfer()
    latents = pkgutil.resolve_name("slime_like_plugins.dcp.latent_attention")
    for target in (
        "sglang.srt.layers.dcp:cp_lse_ag_out_rs_mha",
        f"sglang.srt.mem_cache.memory_pool:MLATokenToKVPool.{latents.RESOLVED}",
        f"sglang.srt.models.deepseek_v2:DeepseekV2ForCausalLM.{latents.METADATA}",
    ):
        pkgutil.resolve_name(target)
    check_overrides(pkgutil.resolve_name("slime_like_plugins.dcp.flashinfer_attention"))
    check_options()


def check_options() -> None:
    """Assert that SGLang has no option of DCP without a key here, and that consecutive tokens are on different ranks."""
    fields = pkgutil.resolve_name("sglang.srt.server_args:ServerArgs").__struct_fields__
    options = [name for name in fields if re.search("dcp|decode_context|interleave", name)]
    assert sorted(options) == ["dcp_comm_backend", "dcp_replicate_q_proj", "dcp_size"], f"ServerArgs has {options}"
    lens = inspect.signature(pkgutil.resolve_name("sglang.srt.layers.dcp:get_dcp_lens")).parameters
    assert lens["interleave_size"].default == 1


def check_overrides(module: Any) -> None:
    """Assert that SGLang has every method that ``module`` overrides, with the parameters that the override passes on."""
    for override in (module.ShardedDecodePlans, module.ShardedPrefillPlans, module.ShardedFlashInfer):
        for name in ("call_begin_forward", "init_forward_metadata_out_graph", "forward_decode", "forward_extend"):
            if name not in vars(override):
                continue
            names = list(inspect.signature(getattr(override.__base__, name)).parameters)
            parameters = [key for key in inspect.signature(getattr(override, name)).parameters if key != "options"]
            assert [key for key in names if key in parameters] == parameters, (
                f"{override.__base__.__name__}.{name} has {names}"
            )
    assert "dcp_kv_mask" in inspect.signature(pkgutil.resolve_name(POOL).set_kv_buffer).parameters
    reader = inspect.signature(pkgutil.resolve_name(READER).pack_read_stream).parameters
    parameters_read = ("plan", "req_pool_indices", "seq_lens", "indptr", "out", "kv_start_idx", "kind")
    assert all(name in reader for name in parameters_read), f"{READER}.pack_read_stream has {list(reader)}"


def kv_capacity() -> None:
    """Install the hooks that count the use of the KV cache and those that admit requests by it."""
    from slime_like_plugins.kv_capacity import admission, usage

    usage.install()
    charge = inspect.signature(pkgutil.resolve_name(admission.ADDER)._update_prefill_budget)
    assert list(charge.parameters)[:4] == ["self", "prefix_len", "extend_input_len", "max_new_tokens"], charge
    admission.install()


def flow_mla() -> None:
    """Install the hooks and flags of FlowMLA, and check the fields, values and functions that they use."""
    from slime_like.config.schema.flow_mla import SKIP_VARIABLE, TRUE_VALUES, required_values
    from slime_like_plugins.flow_mla import flags, hooks

    flags.install("flow_mla")
    hooks.install()
    make_layers = pkgutil.resolve_name("sglang.srt.utils.common:make_layers")
    assert list(inspect.signature(make_layers).parameters)[:2] == ["num_hidden_layers", "layer_fn"]
    fields = pkgutil.resolve_name("sglang.srt.server_args:ServerArgs").__struct_fields__
    missing = sorted({*required_values("p2p")} - {*fields})
    assert not missing, f"ServerArgs has no {', '.join(missing)}"
    variable = getattr(pkgutil.resolve_name("sglang.srt.environ:envs"), SKIP_VARIABLE)
    assert all(variable.parse(value) is True for value in TRUE_VALUES) and variable.parse("no") is False
    for name in ("ModelWeightParameter", "BlockQuantScaleParameter"):  # classes of FP8 weights
        parameter = pkgutil.resolve_name(f"sglang.srt.layers.parameter:{name}")
        weight: Any = parameter(data=torch.empty(2, 2), input_dim=1, output_dim=0, weight_loader=len)
        weight._weight_loader = max
        assert weight.weight_loader is max


def remote_experts() -> None:
    """Install the hooks and flags of remote experts, and check the fields and functions that they use."""
    from slime_like.config.schema.remote_experts import UNSUPPORTED_FIELDS
    from slime_like_plugins.remote_experts import hooks

    flags = pkgutil.resolve_name("slime_like_plugins.remote_experts.flags")
    flags.install("remote_experts")
    hooks.install()
    fields = pkgutil.resolve_name("sglang.srt.server_args:ServerArgs").__struct_fields__
    missing = sorted({*UNSUPPORTED_FIELDS, "moe_runner_backend", "disable_cuda_graph"} - {*fields})
    assert not missing, f"ServerArgs has no {', '.join(missing)}"
    layer = pkgutil.resolve_name("sglang.srt.layers.moe.fused_moe_triton.layer:FusedMoE")
    parameters = list(inspect.signature(layer._weight_loader_impl).parameters)
    assert parameters == ["self", "param", "loaded_weight", "weight_name", "shard_id", "expert_id"]
    assert list(inspect.signature(layer.weight_loader).parameters) == parameters


def unused_libraries() -> None:
    """Import SGLang's server, check that ``sglang_imports`` defers its libraries, and use a deferred loss."""
    pkgutil.resolve_name("sglang.srt.entrypoints.http_server")
    libraries = sorted({"megatron.core", "mistral_common.tokens", "scipy"} & sys.modules.keys())
    assert not libraries, f"SGLang imports {', '.join(libraries)}"
    losses: Any = pkgutil.resolve_name("transformers.modeling_utils:LOSS_MAPPING")
    assert isinstance(losses, DeferredLosses)
    del sys.modules[LOSSES]  # as at the end of ``sglang_imports``
    assert losses["ForCausalLM"] is pkgutil.resolve_name(f"{LOSSES}:ForCausalLMLoss")
    assert {*losses} == {*pkgutil.resolve_name(f"{LOSSES}:LOSS_MAPPING")}


def patched_modules() -> list[str]:
    """Return the modules of megatron-core that are patched on a machine without GPUs."""
    from slime_like.train.megatron.platform import cpu_patches, patches

    return sorted({*patches.table(), *cpu_patches.PATCHES})


def megatron() -> dict[str, str | None]:
    """Import each patched module: its patches run after its body."""
    from slime_like.train.megatron.platform import host

    host.install("cpu")
    problems = {name: problem(lambda n=name: importlib.import_module(n)) for name in patched_modules()}
    return {**problems, "every patch": problem(host.verify)}


def of_torch() -> dict[str, str | None]:
    """Wrap torch's collectives and remove the wrapper, without and with the release of communicators."""
    from slime_like.config.schema.guard_policy import GuardSpec
    from slime_like.distributed.wrapper import install

    def install_and_remove(release: bool) -> None:
        install.install(GuardSpec(wrap=True, release=release), torch.device("cpu"), 0)
        install.remove()

    return {name: problem(lambda r=name == "release": install_and_remove(r)) for name in WRAPPERS}


CHECKS: dict[str, Callable[[], dict[str, Any]]] = {"sglang": sglang, "megatron": megatron, "torch": of_torch}


def in_fork(package: str) -> dict[str, Any] | str:
    """Return the problems of an upstream package, found by a fork of this process, or the output of a failed fork."""
    with tempfile.TemporaryFile("w+") as results, tempfile.TemporaryFile("w+", errors="replace") as output:
        if (pid := os.fork()) == 0:
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
            try:
                with heavy_imports():
                    json.dump(CHECKS[package](), results)
                results.flush()
                os._exit(0)
            except BaseException:  # noqa: BLE001 (fault boundary: the test shows it)
                sys.stdout.flush()
                traceback.print_exc()
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        file = output if code else results
        file.seek(0)
        return f"ended with {code}\n{file.read()}" if code else json.load(file)


def main() -> None:
    """Print the problems of the packages that the command line names."""
    sys.stdout.write(json.dumps({package: in_fork(package) for package in sys.argv[1:]}) + "\n")


if __name__ == "__main__":
    main()
