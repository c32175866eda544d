"""In and out of the Hugging Face world. Nothing here needs torch or transformers until it is used."""

from __future__ import annotations

from typing import Any

__all__ = ["GnomonConfig", "GnomonForCausalLM", "register"]


def register() -> None:
    """Teach transformers' `AutoConfig` and `AutoModelForCausalLM` the model type "gnomon".

    `import gnomon` does so as soon as transformers is there. Only the config is imported: transformers may be half
    imported at that moment. The model follows with the first config.
    """
    from transformers.models.auto.configuration_auto import AutoConfig

    from gnomon.models.hf.configuration import GnomonConfig

    GnomonConfig.made = _made
    AutoConfig.register("gnomon", GnomonConfig, exist_ok=True)


def _made(config: Any) -> None:
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    from gnomon.models.hf.modeling import GnomonForCausalLM

    AutoModelForCausalLM.register(type(config), GnomonForCausalLM, exist_ok=True)
    # The folder's own copy of the code was not asked, and is not there when this model is saved elsewhere.
    vars(config).pop("auto_map", None)


def __getattr__(name: str) -> Any:
    if name == "GnomonConfig":
        from gnomon.models.hf.configuration import GnomonConfig

        return GnomonConfig
    if name == "GnomonForCausalLM":
        from gnomon.models.hf.modeling import GnomonForCausalLM

        return GnomonForCausalLM
    raise AttributeError(f"module 'gnomon.models.hf' has no attribute {name!r}")
