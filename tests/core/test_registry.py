import sys

import pytest

from slime_like.config.schema import names
from slime_like.errors import ConfigError
from slime_like.registry import check, nearest, resolve

TABLE = {"grpo": "slime_like.algo.advantage:grpo"}


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"algo\.x='grpp' is unknown: did you mean 'grpo'\?"):
        check("algo.x", "grpp", TABLE)


def test_a_dotted_path_passes_only_where_allowed() -> None:
    check("reward.name", "mine.module:score", TABLE, dotted=True)
    with pytest.raises(ConfigError, match="is unknown"):
        check("reward.name", "mine.module:score", TABLE)


def test_a_module_that_is_not_there_says_so() -> None:
    with pytest.raises(ConfigError, match="cannot import 'no_such_module'"):
        resolve("reward.name", "no_such_module:score", TABLE)


def test_an_attribute_that_is_not_there_says_so() -> None:
    with pytest.raises(ConfigError, match="has no 'grpq'"):
        resolve("algo.x", "slime_like.algo.advantage:grpq", TABLE)


def test_nothing_near_lists_what_is_known() -> None:
    assert nearest("zzz", ["alpha", "beta"]) == "known: alpha, beta"


# These import megatron, which must stay out of this process: tests/train resolves them.
OF_MEGATRON = ("FAMILIES", "ATTENTIONS", "MIXERS", "EXACT_LAYERS", "CPU_KERNELS")
TABLES = {name: table for name, table in vars(names).items() if name.isupper() and name not in OF_MEGATRON}


@pytest.mark.parametrize(("table", "entry"), [(table, entry) for table, entries in TABLES.items() for entry in entries])
def test_every_name_resolves(table: str, entry: str) -> None:
    assert callable(resolve(table, entry, TABLES[table]))


def test_megatron_stays_out_of_this_process() -> None:
    """It would be there unadapted, and replaces how torch loads tensors, for every later test of the session."""
    assert not [name for name in sys.modules if name.startswith("megatron.core")]
