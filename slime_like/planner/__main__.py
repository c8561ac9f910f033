"""``python -m slime_like.planner MODEL --on 8xH20``: memory and speed of an engine and memory of a trainer rank.

It needs neither the config of a run nor weights.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime_like.errors import ConfigError, SlimeLikeError, exit_code
from slime_like.hardware import GPUS, Hardware, parse_hardware
from slime_like.planner.answer import answer, changes, phases
from slime_like.planner.engine import (
    WEIGHT_BYTES,
    check_engine,
    engine_memory,
    useful_dcp,
    weight_items,
)
from slime_like.planner.engine_settings import EngineSettings
from slime_like.planner.flow_mla import FLOW_CHOICES, flow_projections
from slime_like.planner.models import MODELS, find_shape
from slime_like.planner.plot import Bar, memory_plot, text_plot
from slime_like.planner.shapes import ModelShape
from slime_like.planner.speed import Workload
from slime_like.planner.table import gib
from slime_like.planner.trainer import TrainerSettings, trainer_memory
from slime_like.planner.trainer_changes import FLAGS
from slime_like.planner.view import engine_lines, model_line, phase_lines, trainer_lines
from slime_like.printable import print_output, visible

MAX_COUNT = 2**31  # largest number of tokens, ranks or requests
EXAMPLES = """examples:
  python -m slime_like.planner DeepSeek-R1 --on 8xH20 --weights fp8 --static most --input 1024 --output 2048
  python -m slime_like.planner Qwen3-235B-A22B --on 8xH20 --input 32768 --output 4096 --uniform
  python -m slime_like.planner Qwen3-4B --on 8xH100 --tp 2 --train --train-tp 2 --tokens 16384 --recompute full --svg plan.svg
"""


def main(argv: Sequence[str]) -> int:
    """Print the plan. Return the exit code.

    The code is 0 on success, 1 if the plan cannot be printed, and 2 if the input cannot be planned or the plot cannot be
    written. Raises argparse's ``SystemExit`` on ``--help`` and on flags that argparse rejects.
    """
    try:
        return print_output("\n".join(_lines(_arguments(argv))) + "\n")
    except SlimeLikeError as error:
        error.say()
        return exit_code(error)
    except SystemExit:  # raised by argparse, which has written its help
        print_output("")
        raise


def _lines(options: argparse.Namespace) -> Iterator[str]:
    shape = find_shape("MODEL", options.model)
    hardware = parse_hardware("--on", options.on)
    settings, workload = _engine(options, shape, hardware), Workload(options.input, options.output, options.uniform)
    if workload.input + workload.output > shape.max_positions:
        raise ConfigError(
            f"--input {workload.input} + --output {workload.output} is above the {shape.max_positions} positions of "
            f"{shape.name}: lower --input or --output"
        )
    now = answer(shape, settings, hardware, workload)
    alternatives = tuple(changes(shape, settings, hardware, workload))
    bars = [Bar("engine", now.memory.table)]
    yield f"{model_line(shape)}; {hardware}: {hardware.gpu.memory / 2**30:.1f} GiB each"
    yield ""
    yield from engine_lines(shape, hardware, workload, now, alternatives)
    if options.train:
        trainer = _trainer(options, shape, hardware)
        table = trainer_memory(shape, trainer)
        bars.append(Bar("trainer", table))
        yield ""
        yield from trainer_lines(shape, trainer, table, hardware)
        yield ""
        releasable_engine = engine_memory(shape, replace(settings, prefill_graphs=0), hardware).table
        yield from phase_lines(phases(now.memory.table, releasable_engine, table, hardware.gpu.memory), hardware)
    yield ""
    yield from text_plot(bars, hardware.gpu.memory)
    if options.svg is not None:
        _write_plot(options.svg, memory_plot(visible(f"{shape.name} on {hardware}"), bars, hardware.gpu.memory))
        yield ""
        yield f"plot: {options.svg}"


def _write_plot(path: str, plot: str) -> None:
    """Write the plot. Raises ``ConfigError`` naming ``--svg`` if the path cannot be written."""
    try:
        Path(path).write_text(plot, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--svg {path}: {error.strerror}: give a path that can be written") from error


def _engine(options: argparse.Namespace, shape: ModelShape, hardware: Hardware) -> EngineSettings:
    gpus = options.tp or hardware.gpus
    if gpus > hardware.num_gpus:
        raise ConfigError(f"--tp {gpus} is above the {hardware.num_gpus} GPUs of --on {hardware}: lower --tp")
    static, is_tuned = _static(options.static)
    settings = EngineSettings(
        gpus=gpus,
        dp_attention=options.dp_attention,
        dcp=options.dcp,
        flow_mla=flow_projections(shape, options.flow_mla),
        weights=options.weights,
        kv_bytes={"bf16": 2, "fp8": 1, "float32": 4}[options.kv],
        static=static,
        tuned=is_tuned,
        replicated_head=options.dp_attention > 1,
        max_running=options.max_running,
    )
    check_engine(shape, settings)
    largest = useful_dcp(shape, settings)
    if settings.dcp > largest:
        heads = "the latents of all tokens" if shape.attention is None else f"each of the {shape.kv_heads} KV heads"
        raise ConfigError(
            f"--dcp {settings.dcp}: the {settings.attention_tp} attention ranks store {heads} of {shape.name} "
            f"{largest} time{'s' * (largest != 1)}, and a larger --dcp adds no capacity: set --dcp {largest}"
        )
    _check_static(shape, settings, hardware)
    return settings


def _check_static(shape: ModelShape, settings: EngineSettings, hardware: Hardware) -> None:
    """Raise ``ConfigError`` if ``--static`` is too low for the weights, or too high for the engine's other memory.

    Weights that would not fit a GPU with any ``--static`` raise no error here.
    """
    if settings.static is None:
        return
    weights = sum(item.num_bytes for item in weight_items(shape, settings))
    memory = engine_memory(shape, settings, hardware)
    usable_bytes = (weights + memory.pool + memory.table.of("recurrent states")) / settings.static
    if settings.static * usable_bytes <= weights < usable_bytes:
        raise ConfigError(
            f"--static {settings.static} gives the engine {gib(settings.static * usable_bytes)} of a GPU, less than its "
            f"{gib(weights)} of weights: set --static above {math.ceil(1000 * weights / usable_bytes) / 1000:g}"
        )
    excess = memory.table.total - hardware.gpu.memory
    if memory.pool > 0 and excess > 0:
        max_static = math.floor(1000 * (settings.static - excess / usable_bytes)) / 1000
        advice = f"set --static {max_static:g} or less" if max_static > 0 else "raise --tp, or use larger GPUs"
        raise ConfigError(
            f"--static {settings.static}: with context, graphs and activations the engine needs {gib(memory.table.total)} "
            f"of each GPU's {gib(hardware.gpu.memory)}: {advice}"
        )


def _static(text: str) -> tuple[float | None, bool]:
    """Parse ``--static``: a fraction, ``default`` or ``most``. Return the fraction or None, and whether the text is ``most``.

    Raises ``ConfigError`` on any other text.
    """
    if text in ("default", "most"):
        return None, text == "most"
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    if not 0 < fraction < 1:
        raise ConfigError(f"--static {text}: give a fraction between 0 and 1, default (SGLang's) or most")
    return fraction, False


def _trainer(options: argparse.Namespace, shape: ModelShape, hardware: Hardware) -> TrainerSettings:
    model = options.train_tp * options.train_pp * options.train_cp
    if hardware.num_gpus % model:
        raise ConfigError(
            f"--train-tp {options.train_tp} * --train-pp {options.train_pp} * --train-cp {options.train_cp} = {model} does "
            f"not divide the {hardware.num_gpus} GPUs of --on {hardware}: set a product that does"
        )
    if shape.heads % options.train_tp or (shape.attention is not None and shape.kv_heads % options.train_tp):
        raise ConfigError(
            f"--train-tp {options.train_tp} does not divide the {shape.heads} attention heads and {shape.kv_heads} KV heads of "
            f"{shape.name}: set a common divisor"
        )
    if options.train_pp > len(shape.layers):
        raise ConfigError(
            f"--train-pp {options.train_pp} is above the {len(shape.layers)} layers of {shape.name}: lower it"
        )
    distributed = options.distributed_optimizer == "true"
    if options.offload and not distributed:
        raise ConfigError(
            f"--offload {options.offload:g} needs --distributed-optimizer true: set --distributed-optimizer true, or remove "
            "--offload"
        )
    if shape.experts is None and options.train_ep > 1:
        raise ConfigError(f"--train-ep {options.train_ep}: {shape.name} has no experts: set --train-ep 1")
    experts = 1 if shape.experts is None else shape.experts.num_experts
    ranks = hardware.num_gpus // options.train_pp
    if ranks % options.train_ep or experts % options.train_ep:
        raise ConfigError(
            f"--train-ep {options.train_ep} must divide the {experts} experts of {shape.name} and the {ranks} ranks of a pipeline "
            "stage: set --train-ep to a common divisor"
        )
    num_features, num_sharing = 1 if shape.experts is None else shape.experts.width, ranks // options.train_ep
    if num_sharing % options.train_etp or num_features % options.train_etp:
        raise ConfigError(
            f"--train-etp {options.train_etp} must divide the {num_features} features of an expert of {shape.name} and the "
            f"{num_sharing} ranks that hold the same experts ({ranks} ranks of a pipeline stage / --train-ep {options.train_ep}): "
            "set --train-etp to a common divisor"
        )
    return TrainerSettings(
        tp=options.train_tp,
        pp=options.train_pp,
        cp=options.train_cp,
        dp=hardware.num_gpus // model,
        ep=options.train_ep,
        etp=options.train_etp,
        tokens=options.tokens,
        recompute=options.recompute,
        logits_chunk=options.logits_chunk,
        offload=options.offload,
        distributed_optimizer=distributed,
    )


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MAX_COUNT}")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1")
    return value


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m slime_like.planner",
        usage="%(prog)s MODEL --on [NODESx]GPUSxNAME [options]; --help lists them",
        description="Memory of SGLang engines and Megatron ranks on GPUs, the batch that fits and its limit, and the effect "
        "of each change. Needs no weights. docs/planner.md compares it with published and traced runs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    models = f"a folder with a config.json, or one of {', '.join(MODELS)}"
    parser.add_argument("model", metavar="MODEL", help=models)
    parser.add_argument("--on", required=True, metavar="[NODESx]GPUSxNAME", help=f"hardware; names: {', '.join(GPUS)}")
    load = parser.add_argument_group("workload")
    load.add_argument("--input", type=_count, default=1_024, metavar="TOKENS", help="prompt length (1024)")
    load.add_argument("--output", type=_count, default=2_048, metavar="TOKENS", help="response length (2048)")
    load.add_argument("--uniform", action="store_true", help="lengths are uniform up to --input and --output")
    engine: Any = parser.add_argument_group("engine")
    engine.add_argument("--tp", type=_count, metavar="N", help="GPUs of one engine (default: all of a node)")
    engine.add_argument(
        "--dp-attention", type=_count, default=1, metavar="N", help="data-parallel attention groups (1)"
    )
    engine.add_argument("--dcp", type=_count, default=1, metavar="N", help="decode context parallel ranks (1)")
    engine.add_argument(
        "--flow-mla", choices=("none", *FLOW_CHOICES), default="none", help="projections FlowMLA shards"
    )
    engine.add_argument(
        "--weights", choices=tuple(WEIGHT_BYTES), default="bfloat16", help="of linear layers (bfloat16)"
    )
    engine.add_argument("--kv", choices=("bf16", "fp8", "float32"), default="bf16", help="KV cache elements (bf16)")
    engine.add_argument(
        "--static", default="default", metavar="SHARE", help="mem_fraction_static: a share, default (SGLang's), or most"
    )
    engine.add_argument("--max-running", type=_count, metavar="N", help="max_running_requests of one engine")
    train: Any = parser.add_argument_group("trainer, with --train")
    train.add_argument("--train", action="store_true", help="show a trainer rank on all GPUs of --on")
    for name in ("tp", "pp", "cp", "ep", "etp"):
        train.add_argument(f"--train-{name}", type=_count, default=1, metavar="N", help=f"parallel.{name} (1)")
    train.add_argument("--tokens", type=_count, default=8_192, metavar="N", help="parallel.max_tokens_per_rank (8192)")
    train.add_argument(
        "--recompute", choices=("none", "selective", "full"), default="none", help="model.recompute (none)"
    )
    train.add_argument("--logits-chunk", type=_count, default=4_096, metavar="N", help="model.logits_chunk (4096)")
    train.add_argument("--offload", type=_share, default=0.0, metavar="SHARE", help="of the optimizer on the host (0)")
    train.add_argument(
        "--distributed-optimizer", choices=("true", "false"), default="true", help="over data parallel ranks (true)"
    )
    parser.add_argument("--svg", metavar="FILE", help="write the memory tables as a plot")
    options = parser.parse_args(argv)
    if not options.model:
        parser.error(f"MODEL is empty: give {models}")
    fields = {flag: flag.removeprefix("--").replace("-", "_") for flag in FLAGS.values()}
    unused_flags = [flag for flag, field in fields.items() if getattr(options, field) != parser.get_default(field)]
    if unused_flags and not options.train:
        parser.error(f"{unused_flags[0]} has no effect without --train: add --train")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
