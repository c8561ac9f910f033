"""Assignment of decoder layers to pipeline segments, which the pipeline ranks hold.

This module does not import torch. Segment ``v * pp + r`` is virtual stage v of pipeline rank r: with two ranks and two
virtual stages, rank 0 holds the first and the third segment, rank 1 the second and the fourth.
"""

from __future__ import annotations

import re

from slime_like.config.schema.model import ParallelConfig
from slime_like.errors import ConfigError

MAX_LAYOUT_LEN = 10_000  # characters of parallel.pipeline_layout without repetitions
UNEVEN = ("first_stage_layers", "last_stage_layers")


def segments(parallel: ParallelConfig, num_layers: int) -> tuple[int, ...]:
    """Return the number of decoder layers of each segment, ``pp * vpp`` numbers.

    ``vpp`` is ``parallel.vpp``, unless ``layers_per_virtual_stage`` or ``pipeline_layout`` implies it. The default is
    an even split; early segments get one layer more if there is a remainder. Raises ``ConfigError`` if the keys
    contradict each other or do not fit ``num_layers``, or if ``pipeline_layout`` is invalid.
    """
    check_pipeline(parallel)
    if parallel.pipeline_layout is not None:
        return _checked_layout(parallel, parallel.pipeline_layout, num_layers)
    if any(getattr(parallel, key) is not None for key in UNEVEN):
        return _uneven(parallel, num_layers)
    pp, per_stage = parallel.pp, parallel.layers_per_virtual_stage
    if per_stage is not None:
        if num_layers % (pp * per_stage):
            raise ConfigError(
                f"parallel.layers_per_virtual_stage={per_stage} * parallel.pp={pp} = {pp * per_stage} does not divide "
                f"the model's {num_layers} layers: set parallel.vpp instead, or {_divisors(num_layers, pp)}"
            )
        return (per_stage,) * (num_layers // per_stage)
    return even_segments(num_layers, pp, parallel.vpp)


def even_segments(num_layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Return the number of decoder layers of each of ``pp * vpp`` segments in an even split.

    Raises ``ConfigError`` if a segment would be empty.
    """
    num_segments = pp * vpp
    if num_layers < num_segments:
        setting = (
            f"parallel.pp={pp} * parallel.vpp={vpp} = {num_segments} pipeline segments are"
            if vpp > 1
            else f"parallel.pp={pp} is"
        )
        raise ConfigError(
            f"{setting} more than the model's {num_layers} layers: lower parallel.{'vpp' if vpp > 1 else 'pp'}"
        )
    base, extra = divmod(num_layers, num_segments)
    return tuple(base + (segment < extra) for segment in range(num_segments))


def check_pipeline(parallel: ParallelConfig) -> None:
    """Raise ``ConfigError`` on keys that contradict each other regardless of the model."""
    pp, vpp = parallel.pp, parallel.vpp
    settings = [f"parallel.{key}={getattr(parallel, key)}" for key in UNEVEN if getattr(parallel, key) is not None]
    if parallel.layers_per_virtual_stage is not None:
        settings.append(f"parallel.layers_per_virtual_stage={parallel.layers_per_virtual_stage}")
    if parallel.pipeline_layout is not None:
        settings.append(f"parallel.pipeline_layout={parallel.pipeline_layout!r}")
    if vpp > 1:
        settings.append(f"parallel.vpp={vpp}")
    if settings and pp == 1:
        raise ConfigError(
            f"{settings[0]} with parallel.pp=1: there is no pipeline to split; raise parallel.pp, or remove "
            f"{settings[0].partition('=')[0]}"
        )
    if parallel.pipeline_layout is not None and len(settings) > 1:
        conflicts = [key for key in settings if not key.startswith(("parallel.pipeline_layout", "parallel.vpp"))]
        if conflicts:
            raise ConfigError(
                f"{conflicts[0]} with parallel.pipeline_layout, which sets the whole layout: remove {conflicts[0].partition('=')[0]}, or "
                "remove parallel.pipeline_layout"
            )
    if parallel.layers_per_virtual_stage is not None and len(settings) > 1:
        conflict = next(key for key in settings if not key.startswith("parallel.layers_per_virtual_stage"))
        raise ConfigError(
            f"{conflict} with parallel.layers_per_virtual_stage: both split the layers; remove {conflict.partition('=')[0]}, or "
            "remove parallel.layers_per_virtual_stage"
        )


def parse_layout(text: str) -> tuple[int, ...]:
    """Return the number of decoder layers of each segment of a Megatron pipeline layout such as ``Et*3|(tt|)*2tL``.

    ``t`` is a decoder layer, ``E`` the embedding and ``L`` the output layer. A bar separates segments; ``x*n`` and ``(...)*n``
    repeat. Raises ``ConfigError`` on other text, or if a segment has no decoder layer. Notation: megatron-core,
    transformer/pipeline_parallel_layer_layout.py.
    """
    flat = re.sub(r"[,\s]", "", text)
    setting = f"parallel.pipeline_layout={text!r}"

    for pattern in (r"\(([^()]+)\)\*(\d+)", r"([A-Za-z])\*(\d+)"):
        if sum(len(part) * int(number) for part, number in re.findall(pattern, flat)) > MAX_LAYOUT_LEN:
            raise ConfigError(f"{setting} repeats more than {MAX_LAYOUT_LEN:,} characters: correct the numbers after *")
        flat = re.sub(pattern, lambda match: match[1] * int(match[2]), flat)
    if unknown_characters := sorted(set(flat) - set("EtL|")):
        raise ConfigError(
            f"{setting} has {''.join(unknown_characters)!r}: write t (decoder layer), E (embedding), L (output layer), |, x*n "
            "and (...)*n"
        )
    parts = flat.split("|")
    if flat.count("E") != 1 or flat.count("L") != 1 or not (flat.startswith("E") and flat.endswith("L")):
        raise ConfigError(
            f"{setting}: write the embedding E once, at the start, and the output layer L once, at the end"
        )
    sizes = tuple(part.count("t") for part in parts)
    if 0 in sizes:
        raise ConfigError(
            f"{setting}: segment {sizes.index(0) + 1} of {len(sizes)} has no layer t; every segment needs at least one"
        )
    return sizes


def _checked_layout(parallel: ParallelConfig, text: str, num_layers: int) -> tuple[int, ...]:
    sizes = parse_layout(text)
    setting = f"parallel.pipeline_layout={text!r}"
    if len(sizes) % parallel.pp:
        raise ConfigError(
            f"{setting} has {len(sizes)} segments, which parallel.pp={parallel.pp} does not divide: change the number of segments, "
            "or parallel.pp"
        )
    if parallel.vpp not in (1, len(sizes) // parallel.pp):
        raise ConfigError(
            f"{setting} has {len(sizes)} segments / parallel.pp {parallel.pp} = {len(sizes) // parallel.pp} per rank, "
            f"but parallel.vpp={parallel.vpp}: remove parallel.vpp"
        )
    if sum(sizes) != num_layers:
        raise ConfigError(
            f"{setting} has {' + '.join(map(str, sizes))} = {sum(sizes)} layers, but the model has {num_layers}: correct the number of t"
        )
    return sizes


def _uneven(parallel: ParallelConfig, num_layers: int) -> tuple[int, ...]:
    """Return the number of decoder layers of each segment, ``pp * vpp`` numbers.

    The first and the last rank have their configured layers, if any, and the other ranks equal shares of the rest; each
    rank's layers are split evenly between its segments. This is Megatron's rule. Raises ``ConfigError`` if one of these splits
    is impossible.
    """
    first, last, pp, vpp = parallel.first_stage_layers, parallel.last_stage_layers, parallel.pp, parallel.vpp
    middle = num_layers - (first or 0) - (last or 0)
    ranks = pp - (first is not None) - (last is not None)
    settings = " and ".join(
        f"parallel.{key}={value}" for key, value in zip(UNEVEN, (first, last), strict=True) if value is not None
    )
    summary = (
        f"{settings} leave {middle} of the model's {num_layers} layers for the other {ranks} of parallel.pp={pp} ranks"
    )
    if middle < ranks or (ranks == 0) != (middle == 0) or (ranks and middle % ranks):
        raise ConfigError(
            f"{summary}: every rank needs layers, and the other ranks need equal numbers; change "
            f"{' or '.join(f'parallel.{key}' for key, value in zip(UNEVEN, (first, last), strict=True) if value is not None)}"
        )
    per_rank = [middle // ranks] * ranks if ranks else []
    per_rank = [*([first] if first is not None else []), *per_rank, *([last] if last is not None else [])]
    if indivisible := [n for n in per_rank if n % vpp]:
        raise ConfigError(
            f"{settings}: ranks have {per_rank} layers; parallel.vpp={vpp} does not divide {indivisible[0]}: lower parallel.vpp"
        )
    return tuple(n // vpp for n in per_rank) * vpp


def _divisors(num_layers: int, pp: int) -> str:
    valid_sizes = [str(n) for n in range(1, num_layers + 1) if num_layers % (pp * n) == 0]
    return f"one of {', '.join(valid_sizes)}" if valid_sizes else f"a parallel.pp that divides {num_layers}"
