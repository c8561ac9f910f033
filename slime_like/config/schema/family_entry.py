"""Entries of table FAMILIES, which describe a model family without importing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FamilyEntry:
    """Path of a ``Family`` subclass and the properties in which the family differs from the defaults."""

    path: str  # "module:attribute"
    output_gate: bool = False  # attention has an output gate as wide as its queries
    engine_ties: bool = True  # SGLang's model reads tie_word_embeddings
    fused_engine_model: str = (
        ""  # SGLang's class, if sglang_cpu's fused forward can replace its forward; empty: SGLang's forward runs
    )
    bitwise: bool = False  # tested: on a CPU with run.deterministic, engine and trainer agree bitwise
    config_class: str = ""  # model_type whose transformers config reads the folder, if the family's own has none
    yarn: bool = False  # rope_type=yarn is supported
    engine_fields: Mapping[str, object] = field(default_factory=dict[str, object])
    """Fields that SGLang reads in config.json and transformers does not write -> value."""
