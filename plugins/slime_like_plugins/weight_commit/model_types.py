"""Config classes for model types that transformers lacks, so that an engine uses the same class as the trainer."""

from __future__ import annotations

from slime_like.config.schema.names import FAMILIES


def register() -> None:
    """Register a config class for each family that sets ``FamilyEntry.config_class``, unless transformers knows its model_type.

    SGLang reads config.json through transformers, without the code of the model's folder.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for name, family in FAMILIES.items():
        if family.config_class and name not in CONFIG_MAPPING:
            base = CONFIG_MAPPING[family.config_class]
            # transformers finds the tokenizer by the name of the config class.
            AutoConfig.register(name, type(base.__name__, (base,), {"model_type": name}))
