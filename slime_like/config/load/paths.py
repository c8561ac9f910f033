"""Location of the folder ``configs``."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from slime_like.errors import ConfigError


def config_folder() -> Path:
    """Return the folder ``configs``: next to the package in a checkout, in the environment's data folder if installed.

    Raises ``ConfigError`` if neither exists.
    """
    installed_configs = Path(sysconfig.get_path("data")) / "share" / "slime_like" / "configs"
    places = [Path(__file__).parents[3] / "configs", installed_configs]
    for place in places:
        if (place / "train.yaml").is_file():
            return place.resolve()
    raise ConfigError(
        f"configs/train.yaml is missing: looked in {' and '.join(map(str, places))}; reinstall slime_like"
    )
