"""In and out of the Hugging Face world. Nothing here needs torch or transformers until it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnomon.errors import UserError
from gnomon.lazy import lazy

if TYPE_CHECKING:  # for editors and type checkers, which do not follow `lazy`
    from gnomon.models.hf.configuration import GnomonConfig as GnomonConfig
    from gnomon.models.hf.modeling import GnomonForCausalLM as GnomonForCausalLM
    from gnomon.models.hf.modeling import GnomonModel as GnomonModel

__all__ = ["GnomonConfig", "GnomonForCausalLM", "GnomonModel", "register"]


def register() -> None:
    """Teach transformers' `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` the model type "gnomon".

    After it, exported folders of gnomon's own class and checkpoints of runs open with the installed code, without
    `trust_remote_code`. Imports transformers; calling it again does nothing.

    Raises:
        UserError: transformers is not installed.
    """
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    except ImportError as error:
        raise UserError('gnomon.register() needs transformers: pip install "gnomon[hf]"') from error

    from gnomon.models.hf.configuration import GnomonConfig
    from gnomon.models.hf.modeling import GnomonForCausalLM, GnomonModel

    AutoConfig.register("gnomon", GnomonConfig, exist_ok=True)
    AutoModel.register(GnomonConfig, GnomonModel, exist_ok=True)
    AutoModelForCausalLM.register(GnomonConfig, GnomonForCausalLM, exist_ok=True)


if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(
        __name__, {"GnomonConfig": "configuration", "GnomonForCausalLM": "modeling", "GnomonModel": "modeling"}
    )
