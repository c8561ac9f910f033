"""Where the folder ``configs`` is."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from slime_like.errors import ConfigError


def config_folder() -> Path:
    """The folder ``configs``: beside the package in a checkout, in the environment's data folder when installed.

    Raises ``ConfigError`` when there is neither.
    """
    installed = Path(sysconfig.get_path("data")) / "share" / "slime_like" / "configs"
    places = [Path(__file__).parents[3] / "configs", installed]
    for place in places:
        if (place / "train.yaml").is_file():
            return place.resolve()
    raise ConfigError(
        f"configs/train.yaml is missing: looked in {' and '.join(map(str, places))}; reinstall slime_like"
    )
