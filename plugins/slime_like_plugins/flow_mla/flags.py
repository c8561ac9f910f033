"""Command-line flags that turn FlowMLA on in an SGLang server that is started without slime_like."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from slime_like.config.schema.flow_mla import (
    DEFAULT_WEIGHTS,
    MODULES,
    PREFETCH_DISTANCE,
    TRANSPORTS,
    VARIABLE,
    FlowOptions,
)
from slime_like_plugins.sglang_hooks import PLUGINS_VARIABLE, Hook
from slime_like_plugins.sglang_hooks import install as install_hooks

ENABLE = "--enable-flow-mla"


def add_flags(result: None, parser: argparse.ArgumentParser) -> None:
    """Hook after ``ServerArgs.add_cli_args``: add the flags."""
    group = parser.add_argument_group("FlowMLA")
    group.add_argument(ENABLE, action="store_true", help="shard attention weights over data-parallel attention ranks")
    group.add_argument("--flow-mla-weights", nargs="+", choices=tuple(MODULES), default=list(DEFAULT_WEIGHTS))
    group.add_argument("--flow-mla-prefetch-distance", type=int, choices=range(2, 9), default=PREFETCH_DISTANCE)
    group.add_argument("--flow-mla-transport", choices=TRANSPORTS, default=TRANSPORTS[0])
    group.add_argument("--flow-mla-max-ctas", type=int, choices=range(1, 65), metavar="1..64")


def enable(argv: Sequence[str], name: str) -> None:
    """Enable plugin ``name`` in this process and its children, with the settings in ``argv``.

    Raises ``SystemExit`` if a setting is invalid, or has no effect in combination with another.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(None, parser)
    settings, _ = parser.parse_known_args(argv)
    if settings.flow_mla_transport == "p2p" and settings.flow_mla_max_ctas is not None:
        raise SystemExit(
            f"--flow-mla-max-ctas {settings.flow_mla_max_ctas} with --flow-mla-transport p2p, which has no collective gathers: "
            "remove --flow-mla-max-ctas"
        )
    options = FlowOptions(
        tuple(settings.flow_mla_weights),
        settings.flow_mla_prefetch_distance,
        settings.flow_mla_transport,
        settings.flow_mla_max_ctas,
    )
    os.environ[VARIABLE] = options.to_json()
    os.environ[PLUGINS_VARIABLE] = ",".join(filter(None, (os.environ.get(PLUGINS_VARIABLE), name)))


def install(name: str) -> None:
    """Make SGLang's parser accept the flags of FlowMLA, the plugin ``name``."""
    install_hooks(name, (Hook("sglang.srt.server_args.ServerArgs.add_cli_args", "after", add_flags),))
