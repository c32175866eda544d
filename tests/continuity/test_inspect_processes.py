"""Several processes measure a checkpoint as one does: the same numbers, in the same order, each matrix read once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parallel_cases import Group, spawn
from safetensors.torch import save_file

import gnomon
from gnomon.continuity import inspector
from gnomon.models import Transformer, tiny

# Starting processes takes seconds each, and on a busy machine minutes.
pytestmark = pytest.mark.timeout(900)


def report(folder, full, together):
    found = gnomon.inspect(folder / "model", full=full, per_head=True, compare=folder / "other", together=together)
    return [(r.rows, r.flags, r.matrices, r.serial, r.heads, r.summary, r.sharing) for r in (found, found.other)]


def work(rank, world, barrier, folder):
    seen = []
    real = inspector.measure

    def measure(checkpoint, anatomy, reads, *more):
        seen.append([unit.name for unit in reads])
        return real(checkpoint, anatomy, reads, *more)

    inspector.measure = measure
    with Group(rank, world, Path(folder) / "store"):
        return [report(Path(folder), full, True) for full in (False, True)], seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    for name, seed in (("model", 0), ("other", 1)):
        torch.manual_seed(seed)
        (folder / name).mkdir()
        model = Transformer(tiny(layers=3, width=32, heads=2, context=16))
        save_file(dict(model.state_dict()), folder / name / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def answers(folder):
    return spawn(2, work, str(folder))


@pytest.mark.parametrize("full", [False, True])
def test_same_report_on_every_process(folder, answers, full):
    one = report(folder, full, False)
    for reports, _ in answers:
        assert reports[full] == one


def test_the_reading_is_shared(answers):
    (_, here), (_, there) = answers
    for ours, theirs in zip(here, there):
        assert ours and theirs and not set(ours) & set(theirs)
        assert len(ours) + len(theirs) == 3 * 6
