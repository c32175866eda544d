"""From measured matrices to measured pairs, while the pass over the checkpoint goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gnomon.anatomy import Pair, Part
from gnomon.checkpoints.checkpoint import Checkpoint
from gnomon.continuity import flags, heads, heavy_tails, pair_measures, sharing
from gnomon.continuity.one_pass import Measured, Options


class Pairing:
    """Forms each pair when its second matrix arrives, and lets go of what is done with.

    Attributes:
        measured: every matrix added, its leading vectors kept where a map is drawn of them.
        rows, heads, sharing: pair -> what was found.
        matrices: one row per matrix added.
        flags: remarks about matrices and pairs.
    """

    def __init__(self, checkpoint: Checkpoint, pairs: Sequence[Pair], options: Options, keep: float):
        self.checkpoint: Checkpoint = checkpoint
        self.pairs: Sequence[Pair] = pairs
        self.options: Options = options
        self.keep: float = keep
        self.partners: dict[Part, list[Pair]] = {}
        for pair in pairs:
            self.partners.setdefault(pair.first, []).append(pair)
            self.partners.setdefault(pair.second, []).append(pair)
        self.waiting: dict[Part, int] = {part: len(partners) for part, partners in self.partners.items()}
        self.measured: dict[Part, Measured] = {}
        self.rows: dict[Pair, dict[str, Any]] = {}
        self.heads: dict[Pair, list[dict[str, Any]]] = {}
        self.sharing: dict[Pair, dict[str, Any]] = {}
        self.shared: set[Part] = set()
        self.matrices: list[dict[str, Any]] = []
        self.flags: list[dict[str, Any]] = []

    def add(self, results: list[Measured]) -> None:
        for one in results:
            self.measured[one.part] = one
            self.flags += flags.of_matrix(one, self.options.fold_norms)
            self.matrices.append(_matrix(one, self.checkpoint, self.options.k))
            for pair in self.partners.get(one.part, ()):
                if pair.first in self.measured and pair.second in self.measured:
                    self._pair(pair)
            self._shrink(one)

    def _pair(self, pair: Pair) -> None:
        first, second = self.measured[pair.first], self.measured[pair.second]
        row = _pair_columns(pair)
        broken = [one.error for one in (first, second) if one.at is None]
        if first.at is None or second.at is None:
            row |= pair_measures.unmeasured(pair.first.shape, pair.second.shape, self.options.k)
            row |= {"defined": False, "reason": "; ".join(broken)}
        else:
            row |= pair_measures.compare(first.at, second.at, self.options.k, self.options.full)
            doubts = [pair_measures.undefined(first.at), pair_measures.undefined(second.at)]
            names = ("first: ", "second: ")
            reason = "; ".join(name + doubt for name, doubt in zip(names, doubts) if doubt)
            if not reason and self._copied(first, second):
                reason = "both layers hold the same numbers"
                message = f"{pair.first.name} and {pair.second.name} hold the same numbers: 1.0 by identity"
                self.flags.append(flags.flag("copied", message, pair.second))
                row["subspace_defined"] = False
            row |= {"defined": not reason, "reason": reason}
        self.rows[pair] = row
        self.heads[pair] = heads.rows(first, second)
        # Two by two, (0, 1), (2, 3) …: the full tier goes up the depth, so the first free ones are these.
        if self.options.full and not self.shared & {pair.first, pair.second}:
            if row := sharing.row(first, second, self.keep):
                self.sharing[pair] = row
                self.shared |= {pair.first, pair.second}
        for one in (first, second):
            self.waiting[one.part] -= 1
            self._shrink(one)

    def _copied(self, first: Measured, second: Measured) -> bool:
        """Equal numbers. Their spectra are compared first; only if those agree are both read again."""
        a, b = first.at, second.at
        assert a is not None and b is not None
        if (
            first.part.shape != second.part.shape
            or not torch.allclose(a.sigma_k, b.sigma_k, rtol=1e-6, atol=0)
            or abs(a.norm / b.norm - 1) > 1e-9
        ):
            return False
        one, two = (part.block.take(self.checkpoint.read(part.name)) for part in (first.part, second.part))
        return torch.equal(one, two)

    def _shrink(self, one: Measured) -> None:
        if one.at is None or self.waiting.get(one.part, 0):
            return
        one.heads = None
        # Experts are many and nothing else compares them; of the others the leading vectors draw the maps.
        one.at = None if one.part.expert is not None else one.at.first(max(self.options.k, 2))


def _pair_columns(pair: Pair) -> dict[str, Any]:
    first, second = pair.first, pair.second
    return {
        "stack": first.stack,
        "role": first.role,
        "expert": first.expert,
        "layer": first.layer,
        "next_layer": second.layer,
        "lag": pair.lag,
        "missing": list(pair.missing),
        "stream": first.stream,
        "tensor": first.name,
        "next_tensor": second.name,
        "shape": list(first.shape),
        "next_shape": list(second.shape),
    }


def _matrix(one: Measured, checkpoint: Checkpoint, k: int) -> dict[str, Any]:
    part, at = one.part, one.at
    row: dict[str, Any] = {
        "stack": part.stack,
        "role": part.role,
        "expert": part.expert,
        "layer": part.layer,
        "tensor": part.name,
        "shape": list(part.shape),
        "dtype": checkpoint.entries[part.name].dtype,
        "stream": part.stream,
        "folded": list(one.folded),
        "error": one.error,
    }
    if at is None:
        return row | dict.fromkeys("norm sigma gap residual stable_rank effective_rank alpha alpha_chance".split(), None)
    full = one.effective_rank is not None
    return row | {
        "norm": at.norm,
        "sigma": at.sigma_k[:k].tolist(),
        "gap": at.gap,
        "residual": float(at.residual_k[:k].max()),
        "stable_rank": at.stable_rank,
        "effective_rank": one.effective_rank,
        "alpha": heavy_tails.exponent(at.sigma_k) if full else None,
        "alpha_chance": heavy_tails.of_chance(at.U_kM.shape[1], at.V_kN.shape[1]) if full else None,
    }
