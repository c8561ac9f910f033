"""Re-exports from ``slime_like_compat``: flags of slime and Megatron, and keys of other projects.

No other module of slime_like imports that package.
"""

from __future__ import annotations

from slime_like_compat.flags.table import ALWAYS, COMBINED, LISTS, SWITCHES, VALUES
from slime_like_compat.flags.translate import ACTIONS, Command, flag_of, translate
from slime_like_compat.names_elsewhere import OTHER_KEYS
from slime_like_compat.verl_keys import VERL_KEYS

__all__ = [
    "ACTIONS",
    "ALWAYS",
    "COMBINED",
    "LISTS",
    "OTHER_KEYS",
    "SWITCHES",
    "VALUES",
    "VERL_KEYS",
    "Command",
    "flag_of",
    "translate",
]
