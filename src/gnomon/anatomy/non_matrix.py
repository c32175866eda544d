"""What is not a matrix between stream and sublayer, told by module type, name and shape in any family."""

from __future__ import annotations

import re

from gnomon.anatomy.names import Name
from gnomon.anatomy.tensors import Tensor

_BUFFER = re.compile(
    r"(?:^|\.)(?:masked_bias|inv_freq|original_inv_freq|position_ids|token_type_ids|num_batches_tracked|running_mean"
    r"|running_var|\w+_integer|\w+_scaling_factor|x_min|x_max|relative_position_index|causal_mask|cos_cached|sin_cached|rotary_emb\.\w+|rope_freqs\.weight)$"
)
# The last two are gnomon's own: the norms of a residual and those at both ends of the stream.
_NORM = re.compile(
    r"norm|(?:^|[._])(?:ln|rms)(?=[._\d]|$)|(?:^|\.)join_\w+\.(?:before|after)$|^(?:entry|exit)$", re.IGNORECASE
)
# T5: one number for each distance and head. State spaces: one decay for each channel and state.
_NUMBERS = ("relative_attention_bias", "A_log")
_CONV = re.compile(r"conv|patch", re.IGNORECASE)


def non_matrix_role(tensor: Tensor, at: Name) -> str | None:
    """The role of a vector, bias, norm, kernel, buffer or scale; None for what may be a matrix."""
    ndim = len(tensor.shape)
    if at.companion:
        return "scale"
    if _BUFFER.search(tensor.name):
        return "buffer"
    if at.leaf in ("bias", "beta"):
        # GPT-2 files carry the causal mask as h.N.attn.bias, (1, 1, n, n).
        return "buffer" if ndim >= 3 else "bias"
    last = at.path.rpartition(".")[2]
    if last in _NUMBERS:
        return "scalar"
    if tensor.kind == "norm" or (ndim <= 1 and _NORM.search(at.path)) or (ndim == 2 and _NORM.search(last)):
        return "norm"
    if tensor.kind == "conv" or (ndim >= 3 and _CONV.search(at.path)):
        return "conv"
    return "scalar" if ndim <= 1 else None
