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
from gnomon.anatomy import Anatomy
from gnomon.checkpoints.checkpoint import Checkpoint
from gnomon.checkpoints.opener import open_checkpoint
from gnomon.continuity import flags, processes, serial_alignment, summary
from gnomon.continuity.one_pass import Measured, Options, Read, measure, plan_reads, workers_and_threads
from gnomon.continuity.pairing import Pairing
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
        source: what `open_checkpoint` takes: folder, file, run folder, hub id, live module, mapping of tensors.
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
    matrices = anatomy.layer_matrices()
    pairs = anatomy.layer_pairs(lag)
    reads = plan_reads(checkpoint, matrices, by_role=full)
    options = Options(k, full, fold_norms, per_head)
    workers, threads = workers_and_threads(reads, full, torch.get_num_threads())
    with torch.no_grad(), _torch_threads(threads), processes.joined() if together else contextlib.nullcontext():
        several = together and dist.is_initialized() and dist.get_world_size() > 1
        ours = processes.own_reads(reads) if several else reads
        found = _shown(measure(checkpoint, anatomy, ours, options, workers, threads), ours, progress)
        pairing = Pairing(checkpoint, pairs, options, keep)
        for _, results in processes.gather(reads, found) if several else found:
            pairing.add(results)
        settings = {
            "k": k,
            "tier": "full" if full else f"top {k}",
            "fold_norms": fold_norms,
            "lag": lag,
            "norm_offset": anatomy.norm_offset if fold_norms else None,
            "keep": keep if full else None,
            "bytes_read": sum(read.nbytes for read in reads),
            "seconds": round(time.monotonic() - started, 3),
        }
        remarks = flags.of_model(checkpoint, anatomy, matrices, pairs) + pairing.flags
        first = not several or dist.get_rank() == 0
        report = _report(checkpoint.name, anatomy.family, settings, remarks, pairing) if first else None
        report = processes.from_first(report) if several else report
        assert report is not None
        if compare is not None:
            same = {"full": full, "fold_norms": fold_norms, "per_head": per_head, "lag": lag, "config": config}
            other = inspect(compare, k, **same, keep=keep, progress=progress, together=together)
            report = replace(report, other=other)
    return report


def _report(model: str, family: str, settings: dict[str, Any], remarks: list[dict[str, Any]], done: Pairing) -> Report:
    k = done.options.k
    measured = list(done.measured.values())
    pairs = sorted(done.pairs, key=lambda pair: summary.role_order(pair.first.stack, pair.first.role))
    rows = [done.rows[pair] for pair in pairs]
    maps = summary.heats(measured, k)
    return Report(
        model=model,
        family=family,
        settings=settings,
        rows=rows,
        flags=remarks,
        summary=summary.summarise(rows, maps),
        matrices=done.matrices,
        serial=serial_alignment.rows(measured, k),
        heads=[row for pair in pairs for row in done.heads[pair]],
        sharing=[done.sharing[pair] for pair in pairs if pair in done.sharing],
        heats=maps,
        leading={one.part: one.at for one in measured if one.at is not None},
        sigma={one.part: one.sigma_k for one in measured if one.sigma_k is not None},
    )


def _shown(
    found: Iterator[tuple[Read, list[Measured]]], reads: Sequence[Read], progress: bool
) -> Iterator[tuple[Read, list[Measured]]]:
    with Progress("inspecting", sum(read.nbytes for read in reads), "B") as bar:
        for read, results in found:
            yield read, results
            if progress:
                bar.advance(read.nbytes, note=read.name)


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
