"""Comparison of the kernels of Gated DeltaNet: parity, speed, memory and start-up of every backend that runs on this machine.

    python benchmarks/gdn.py                                          # arms hf (transformers), torch, fla and flashqla
    python benchmarks/gdn.py --shapes 2048,16,32,128 32x1024,4,8,128 --dtype bfloat16 --rounds 20
    python benchmarks/gdn.py --output docs/measurements/gdn.md        # the page and gdn.svg in the same folder
    python benchmarks/gdn.py --end-to-end +recipe=quickstart_gdn      # runs of --rollouts steps, one per backend

A shape is T,H,HV,D (tokens, key heads, value heads, head size), or NxT,... for N packed sequences. Parity: output, final
state and every gradient, including the gradient of the initial state, are compared with the recurrence, computed token
by token in float64 (tests/gdn/recurrence.py); errors are relative to the largest value of each tensor. Every arm runs
once per round. Times are medians over rounds: device time on a GPU, the process's CPU time (one thread) on a CPU.
Ratios are medians of the rounds' ratios. An arm's first call on a shape is listed separately, because it compiles and tunes
the kernels that no earlier shape has used. The exit code is 1 if parity fails, no arm can run, or all runs of --end-to-end
fail.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

import torch  # noqa: E402

from benchmarks.gdn_arms import GdnArm, GdnShape, kernels_seen, make_arms, make_call, measure, ratio  # noqa: E402
from benchmarks.gdn_plot import plot  # noqa: E402
from benchmarks.options import at_least  # noqa: E402
from benchmarks.run import commit, cpu_model  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from tests.gdn import recurrence  # noqa: E402

ARMS = ("hf", "torch", "fla", "flashqla")
SHAPES = ("2048,4,4,64", "2048,8,8,128", "2048,4,16,128", "512,16,16,128", "64x32,4,4,64")
LONG = (512, 1024, 2048, 4096, 8192)  # lengths in the plot, in tokens
LONG_SHAPE = (4, 4, 64)
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
PARTS = ("out", "final", "dq", "dk", "dv", "dg", "dbeta", "dinitial")  # keys of recurrence.errors
PARITY = {"one sequence": (200,), "packed": (130, 1, 0, 61)}


def shape_of(text: str) -> GdnShape:
    """Parse a shape T,H,HV,D or NxT,H,HV,D, such as ``2048,16,32,128`` or ``64x32,4,4,64``.

    Raises ``ArgumentTypeError`` on other text, and if HV is not a multiple of H.
    """
    match = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*),([1-9]\d*),([1-9]\d*),([1-9]\d*)", text, re.ASCII)
    if match is None or int(match[4]) % int(match[3]):
        raise argparse.ArgumentTypeError(f"{text!r} is not T,H,HV,D or NxT,H,HV,D, with HV a multiple of H")
    num_sequences, length, heads, value_heads, dim = (int(number or 1) for number in match.groups())
    return GdnShape((length,) * num_sequences, heads, value_heads, dim)


def parity(arms: list[GdnArm], options: argparse.Namespace) -> tuple[list[str], bool]:
    """Return a table of errors against the recurrence, and True if every error is within the tolerance of the dtype."""
    dim = 128 if options.device == "cuda" else 64
    rows, within_tolerance = ["| case | arm | " + " | ".join(PARTS) + " |"], True
    rows.append("|---|---|" + "---|" * len(PARTS))
    for case_name, lengths in PARITY.items():
        shape = recurrence.CaseShape(lengths, heads=2, groups=2, key=dim, value=dim)
        case = recurrence.make_case(shape, decay=0.1)
        expected = recurrence.oracle(case)
        for arm in arms:
            if len(lengths) > 1 and not arm.packs:
                continue
            cast = case.to(getattr(torch, options.dtype), options.device, wide=recurrence.LAYER_F32)
            errors = recurrence.errors(recurrence.of_backend(arm.rule, cast), expected)
            assert len(errors) == len(PARTS)
            within_tolerance &= all(error <= TOLERANCE[options.dtype] for error in errors.values())  # False for NaN
            rows.append(
                f"| {case_name} | {arm.name} | " + " | ".join(f"{error:.0e}" for error in errors.values()) + " |"
            )
    return rows, within_tolerance


def speed(arms: list[GdnArm], options: argparse.Namespace) -> list[str]:
    """Return a table: one row per shape and arm, with the speed relative to the first arm measured on the shape."""
    rows = [
        "| T, H/HV x D | arm | first call ms | forward ms | forward + backward ms | peak MiB | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for shape in options.shapes:
        timings = measure(arms, shape, options.device, getattr(torch, options.dtype), options.rounds)
        if not timings:
            rows.append(f"| {shape} | none | | | | | |")
            continue
        base = next(iter(timings.values()))
        for name, timing in timings.items():
            forward, forward_backward = (
                statistics.median(times) * 1e3 for times in (timing.forward, timing.forward_backward)
            )
            ratios = f"{ratio(base.forward, timing.forward):.2f}x, {ratio(base.forward_backward, timing.forward_backward):.2f}x"
            row = f"| {shape} | {name} | {timing.cold * 1e3:.0f} | {forward:.1f} | {forward_backward:.1f} | {timing.peak:.0f} | {ratios} |"
            rows.append(row)
            print(visible(row), file=sys.stderr, flush=True)
    return rows


def growth(arms: list[GdnArm], options: argparse.Namespace) -> tuple[list[str], str]:
    """Return a table and a plot of the time of forward and backward together, over the length of one sequence."""
    heads, value_heads, dim = LONG_SHAPE if options.device == "cpu" else (16, 32, 128)
    lines: dict[str, list[tuple[float, float]]] = {arm.name: [] for arm in arms}
    rows = [f"Shape: one sequence of T tokens, {heads} key heads and {value_heads} value heads of size {dim}.", ""]
    rows += ["| T | " + " | ".join(f"{name} ms" for name in lines) + " | ratio |", "|---|" + "---|" * (len(lines) + 1)]
    for tokens in options.long:
        shape = GdnShape((tokens,), heads, value_heads, dim)
        timings = measure(arms, shape, options.device, getattr(torch, options.dtype), options.rounds)
        for name, timing in timings.items():
            lines[name].append((tokens, statistics.median(timing.forward_backward) * 1e3))
        cells = " | ".join(f"{lines[name][-1][1]:.1f}" for name in lines)
        first, *compared = timings.values()
        rows.append(
            f"| {tokens} | {cells} | {', '.join(f'{ratio(first.forward_backward, timing.forward_backward):.2f}x' for timing in compared)} |"
        )
        print(visible(rows[-1]), file=sys.stderr, flush=True)
    title = f"Gated delta rule, forward + backward, {heads}/{value_heads} heads of {dim}, {options.dtype} on {options.device}"
    return rows, plot(title, "tokens of one sequence", "ms", lines)


def page(arms: list[GdnArm], missing: dict[str, str], options: argparse.Namespace) -> tuple[str, str, bool]:
    """Measure ``arms``; return the report as Markdown, its plot, and True if parity holds."""
    speed_rows = speed(arms, options)  # before other calls compile kernels
    kernel_lines = [
        f"- `{arm.name}`: {arm.rule.kernels()}; seen by the profiler: "
        + ", ".join(
            f"`{name[:60]}`"
            for name in kernels_seen(
                make_call(
                    arm, next(filter(arm.computes, options.shapes)), options.device, getattr(torch, options.dtype)
                ).forward_backward,
                options.device,
            )
        )
        for arm in arms
    ]
    parity_rows, within_tolerance = parity(arms, options)
    growth_rows, picture = growth(arms, options)
    lines = [
        "# Kernels of Gated DeltaNet",
        "",
        f"`python benchmarks/gdn.py {' '.join(sys.argv[1:])}`",
        "",
        f"{commit()} Torch {torch.__version__}, {options.dtype}, {machine(options.device)}; medians of "
        f"{options.rounds} rounds; in a round each arm, an implementation listed under [What ran](#what-ran), runs once.",
        f"Ratios are medians over the rounds of the time of `{arms[0].name}` divided by that of the arm: above 1, the arm is faster. If "
        f"`{arms[0].name}` cannot compute a shape, the first arm that can takes its place. Times are device time on a GPU, and the process's CPU time on a CPU.",
        'The exception is the column "first call ms": the wall time of an arm\'s first call on a shape, forward and backward.',
        "Shapes: T tokens of one sequence (N x T: N packed sequences of T), H key and HV value heads of size D.",
        "",
        "## What ran",
        *kernel_lines,
        *(f"- `{name}` did not run: {reason}" for name, reason in missing.items()),
        "",
        "## Parity with the recurrence in float64",
        "Largest error of output, final state and gradients, relative to the largest value; `dinitial` is the gradient of the initial states.",
        "",
        *parity_rows,
        "",
        "## Speed and memory (ratio: forward, forward + backward)",
        *speed_rows,
        "",
        "## Growth with the length of a sequence (forward + backward)",
        *growth_rows,
    ]
    return "\n".join([*lines, ""]), picture, within_tolerance


def machine(device: str) -> str:
    """Return the name of the GPU; for a CPU its number of cores and its model, with the note that one thread computes."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} cores of {cpu_model()}, one thread"


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=[shape_of(text) for text in SHAPES])
    parser.add_argument("--long", nargs="+", type=at_least(1), default=list(LONG))
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="bfloat16" if device == "cuda" else "float32")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--output", type=Path, help="page to write; its plot goes to the same folder")
    parser.add_argument(
        "--end-to-end", nargs="+", metavar="OVERRIDE", help="arguments of train.py: one run per backend"
    )
    parser.add_argument(
        "--rollouts", type=at_least(1), default=12, help="rollouts of each run of --end-to-end, including the warm-up"
    )
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run the benchmark and return its exit code: 1 if parity fails, no arm can run, or all runs of ``--end-to-end`` fail."""
    options = parse(argv)
    if options.end_to_end:
        from benchmarks.gdn_runs import compare

        backends = [name for name in options.arms if name != "hf"]
        return compare(backends, options.end_to_end, options.rollouts)
    torch.set_num_threads(1)
    arms, missing = make_arms(options.arms, options.device, options.dtype, options.shapes)
    for name, reason in missing.items():
        print(visible(f"{name} does not run here: {reason}"), file=sys.stderr)
    if not arms:
        return 1
    text, picture, within_tolerance = page(arms, missing, options)
    print(visible(text))
    if options.output is not None:
        svg = options.output.with_suffix(".svg")
        svg.write_text(picture)
        options.output.write_text(f"{text}\n![Growth with length]({svg.name})\n")
    if not within_tolerance:
        print("parity FAILED: an error is above the tolerance of the dtype", file=sys.stderr)
    return int(not within_tolerance)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
