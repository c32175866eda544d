"""`inspect`: the continuity of any model across its depth, as one report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from gnomon import anatomy as anatomies
from gnomon.anatomy import Anatomy, Pair, Part
from gnomon.checkpoints.checkpoint import Checkpoint
from gnomon.checkpoints.opener import open_checkpoint
from gnomon.continuity import flags, heads, pair_measures, processes, serial_alignment, sharing, summary
from gnomon.continuity.one_pass import How, Measured, Unit, measure, plan, units, wanted
from gnomon.continuity.report import Report
from gnomon.errors import UserError
from gnomon.progress import Progress


def inspect(
    source: Any,
    k: int = 8,
    *,
    full: bool = False,
    fold_norms: bool = False,
    per_head: bool = False,
    lag: int = 1,
    compare: Any = None,
    base: Any = None,
    config: Mapping[str, Any] | None = None,
    keep: float = 0.7,
    progress: bool = False,
    together: bool = False,
) -> Report:
    """Measure how the leading singular directions of a model run through its depth.

    Args:
        source: what `open_checkpoint` takes: folder, file, run folder, hub id, live module, mapping of
        tensors.
        k: leading singular vectors to find per matrix.
        full: find all of them, in fp64; adds the weighted, Gram and Frobenius measures, effective rank and
            the price of sharing a basis. Hours instead of a minute for large models.
        fold_norms: multiply the gains of neighbouring norms into each matrix first. Numbers move a lot.
        per_head: also compare attention heads.
        lag: compare layers this many places apart.
        compare: a second source, measured the same way (`config` included); shown side by side.
        base: for a LoRA folder, the model its update is added to.
        config: used instead of config.json.
        keep: share of parameters kept in the sharing comparison (full tier).
        progress: show progress with an ETA on stderr.
        together: share the work with the other processes torchrun started, all of which must make this call; each returns
            the same report.

    Returns:
        a `Report`. A model without pairs gives an empty one that says why; a matrix that cannot be measured
        gives rows with `defined` False and no numbers.

    Raises:
        UserError: nothing readable at `source`, or an argument is out of range.
    """
    if k < 1 or lag < 1 or not 0 < keep < 1:
        raise UserError(f"k and lag must be at least 1 and keep between 0 and 1; got k={k}, lag={lag}, keep={keep}")
    started = time.monotonic()
    checkpoint = open_checkpoint(source, base=base, config=config)
    anatomy = _anatomy(source, checkpoint, config)
    parts = wanted(anatomy)
    known = set(parts)
    pairs = [pair for pair in anatomy.pairs(None, lag) if pair.first in known and pair.second in known]
    reads = units(checkpoint, parts, by_role=full)
    work = _Work(checkpoint, How(k, full, fold_norms, per_head), keep, pairs)
    work.flags = flags.of_model(checkpoint, anatomy, parts, pairs)
    total = sum(unit.nbytes for unit in reads)
    settings = {
        "k": k,
        "tier": "full" if full else f"top {k}",
        "fold_norms": fold_norms,
        "lag": lag,
        "norm_offset": anatomy.norm_offset if fold_norms else None,
        "keep": keep if full else None,
    }
    workers, threads = plan(reads, full, torch.get_num_threads())
    with torch.no_grad(), _torch_threads(threads), processes.joined() if together else contextlib.nullcontext():
        several = together and dist.is_initialized() and dist.get_world_size() > 1
        ours = processes.mine(reads) if several else reads
        found = _shown(measure(checkpoint, anatomy, ours, work.how, workers, threads), ours, progress)
        for _, results in processes.gathered(reads, found) if several else found:
            work.take(results)
        measured = not several or dist.get_rank() == 0
        made = work.report(checkpoint, anatomy, settings, total, time.monotonic() - started) if measured else None
        report = processes.from_first(made) if several else made
        assert report is not None
        if compare is not None:
            same = {"full": full, "fold_norms": fold_norms, "per_head": per_head, "lag": lag, "config": config}
            other = inspect(compare, k, **same, keep=keep, progress=progress, together=together)
            report = replace(report, other=other)
    return report


def _shown(
    found: Iterator[tuple[Unit, list[Measured]]], reads: Sequence[Unit], progress: bool
) -> Iterator[tuple[Unit, list[Measured]]]:
    with Progress("inspecting", sum(unit.nbytes for unit in reads), "B") as bar:
        for unit, results in found:
            yield unit, results
            if progress:
                bar.advance(unit.nbytes, note=unit.name)


def _anatomy(source: Any, checkpoint: Checkpoint, config: Mapping[str, Any] | None) -> Anatomy:
    if isinstance(source, torch.nn.Module):
        return anatomies.read(source, config)  # a live module says more than its names do
    return anatomies.read(checkpoint.shapes, checkpoint.config or None)


@contextlib.contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Torch threads for the caller, whose products are as small as the workers': waking more costs more."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


class _Work:
    """Forms each pair when its second matrix arrives, and lets go of what is done with."""

    def __init__(self, checkpoint: Checkpoint, how: How, keep: float, pairs: list[Pair]):
        self.checkpoint, self.how, self.keep = checkpoint, how, keep
        self.pairs = pairs
        self.partners: dict[Part, list[Pair]] = {}
        for pair in pairs:
            self.partners.setdefault(pair.first, []).append(pair)
            self.partners.setdefault(pair.second, []).append(pair)
        self.waiting = {part: len(partners) for part, partners in self.partners.items()}
        self.measured: dict[Part, Measured] = {}
        self.rows: dict[Pair, dict[str, Any]] = {}
        self.heads: dict[Pair, list[dict[str, Any]]] = {}
        self.sharing: dict[Pair, dict[str, Any]] = {}
        self.shared: set[Part] = set()
        self.matrices: list[dict[str, Any]] = []
        self.flags: list[dict[str, Any]] = []

    def take(self, results: list[Measured]) -> None:
        for one in results:
            self.measured[one.part] = one
            self.flags += flags.of_matrix(one, self.how.fold_norms)
            self.matrices.append(_matrix(one, self.checkpoint, self.how.k))
            for pair in self.partners.get(one.part, ()):
                if pair.first in self.measured and pair.second in self.measured:
                    self._pair(pair)
            self._shrink(one)

    def _pair(self, pair: Pair) -> None:
        first, second = self.measured[pair.first], self.measured[pair.second]
        row = _place(pair)
        broken = [one.error for one in (first, second) if one.at is None]
        if first.at is None or second.at is None:
            row |= pair_measures.unmeasured(*pair.first.shape, self.how.k)
            row |= {"defined": False, "reason": "; ".join(broken)}
        else:
            row |= pair_measures.compare(first.at, second.at, self.how.k, self.how.full)
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
        if self.how.full and not self.shared & {pair.first, pair.second}:
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
        if not torch.allclose(a.sigma_k, b.sigma_k, rtol=1e-6, atol=0) or abs(a.norm / b.norm - 1) > 1e-9:
            return False
        one, two = (part.block.take(self.checkpoint.read(part.name)) for part in (first.part, second.part))
        return torch.equal(one, two)

    def _shrink(self, one: Measured) -> None:
        if one.at is None or self.waiting.get(one.part, 0):
            return
        one.heads = None
        # Experts are many and nothing else compares them; of the others the leading vectors draw the maps.
        one.at = None if one.part.expert is not None else one.at.first(self.how.k)

    def report(
        self, checkpoint: Checkpoint, anatomy: Anatomy, settings: dict[str, Any], nbytes: int, seconds: float
    ) -> Report:
        ordered = sorted(self.pairs, key=lambda pair: summary.place(pair.first.stack, pair.first.role))
        rows = [self.rows[pair] for pair in ordered]
        measured = list(self.measured.values())
        maps = summary.heats(measured, self.how.k)
        return Report(
            model=checkpoint.name,
            family=anatomy.family,
            settings={**settings, "bytes_read": nbytes, "seconds": round(seconds, 3)},
            rows=rows,
            flags=self.flags,
            summary=summary.summarise(rows, maps),
            matrices=self.matrices,
            serial=serial_alignment.rows(measured, self.how.k),
            heads=[row for pair in ordered for row in self.heads[pair]],
            sharing=[self.sharing[pair] for pair in ordered if pair in self.sharing],
            heats=maps,
            leading={one.part: one.at for one in measured if one.at is not None},
            sigma={one.part: one.sigma_k for one in measured if one.sigma_k is not None},
        )


def _place(pair: Pair) -> dict[str, Any]:
    first, second = pair.first, pair.second
    return {
        "stack": first.stack,
        "role": first.role,
        "expert": first.expert,
        "layer": first.layer,
        "next_layer": second.layer,
        "lag": pair.lag,
        "tensor": first.name,
        "next_tensor": second.name,
        "shape": list(first.shape),
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
        "stream": "reads" if part.reads_stream else "writes" if part.writes_stream else "",
        "folded": list(one.folded),
        "error": one.error,
    }
    if at is None:
        return row | dict.fromkeys(("norm", "sigma", "gap", "residual", "stable_rank", "effective_rank"), None)
    return row | {
        "norm": at.norm,
        "sigma": at.sigma_k[:k].tolist(),
        "gap": pair_measures.finite(at.gap),
        "residual": float(at.residual_k[:k].max()),
        "stable_rank": at.stable_rank,
        "effective_rank": one.effective_rank,
    }
