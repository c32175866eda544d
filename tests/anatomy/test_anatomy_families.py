"""Every family of the table, on disk and in memory: roles, orientation, exact splits, nothing left over."""

from __future__ import annotations

import anatomy_cases
import numpy as np
import pytest

from gnomon import anatomy

CASES = [(family, layout) for family in anatomy_cases.FAMILIES for layout in ("disk", "memory")]
READERS = set(
    "query key value gate up shared_gate shared_up router shared_router cross_query latent_query "
    "latent_key_value key_rope".split()
)
WRITERS = {"output", "down", "shared_down", "cross_output"}


def shapes(case) -> dict:
    return {name: tensor.shape for name, tensor in case.tensors.items()}


def read_latent(part, case) -> bool:
    """MLA's second projections read a latent, not the stream."""
    return "q_b_proj" in part.name or "kv_b_proj" in part.name


@pytest.mark.parametrize("family, layout", CASES)
def test_every_planted_matrix_is_found(family, layout):
    case = anatomy_cases.case(family, layout)
    found = anatomy.read(shapes(case), case.config)

    assert found.family == case.config["model_type"]
    assert not found.unknown and found.confidence == 1.0
    parts = {(p.name, p.layer, p.role, p.expert): p for p in found if p.layer is not None and p.is_matrix}
    assert parts.keys() == {planted[:4] for planted in case.planted}
    for planted in case.planted:
        part = parts[planted[:4]]
        np.testing.assert_array_equal(part.block.take(case.tensors[planted.tensor]), planted.matrix)
        assert part.shape == planted.matrix.shape
        assert (part.in_axis, part.out_axis) == case.axes[planted.tensor]
        assert part.reads_stream == (part.role in READERS and not read_latent(part, case))
        assert part.writes_stream == (part.role in WRITERS)


@pytest.mark.parametrize("family, layout", CASES)
def test_parts_of_a_tensor_partition_it(family, layout):
    case = anatomy_cases.case(family, layout)
    found = anatomy.read(shapes(case), case.config)
    assert {part.name for part in found} == case.tensors.keys()
    for name, tensor in case.tensors.items():
        numbered = np.arange(tensor.size).reshape(tensor.shape)
        taken = [part.block.take(numbered).ravel() for part in found[name]]
        np.testing.assert_array_equal(np.sort(np.concatenate(taken)), np.arange(tensor.size))
        assert sum(part.block.size(tensor.shape) for part in found[name]) == tensor.size


@pytest.mark.parametrize("family, layout", CASES)
def test_putting_back_what_was_taken_rebuilds_the_tensor(family, layout):
    case = anatomy_cases.case(family, layout)
    found = anatomy.read(shapes(case), case.config)
    for name, tensor in case.tensors.items():
        rebuilt = np.full_like(tensor, np.nan)
        for part in found[name]:
            part.block.put(rebuilt, part.block.take(tensor))
        np.testing.assert_array_equal(rebuilt, tensor)


@pytest.mark.parametrize("family, layout", CASES)
def test_without_a_config_nothing_is_wrong_only_unsure(family, layout):
    """Bare names and shapes: a matrix is found exactly, or its tensor says why it could not be."""
    case = anatomy_cases.case(family, layout)
    found = anatomy.read(shapes(case))
    unsure = {part.name for part in found.unknown}
    parts = {(p.name, p.layer, p.role, p.expert): p for p in found}
    for planted in case.planted:
        if planted.tensor not in unsure:
            part = parts[planted[:4]]
            np.testing.assert_array_equal(part.block.take(case.tensors[planted.tensor]), planted.matrix)
    # Only rows that lie head by head need to know how many heads there are.
    by_head = {
        "gpt_neox": "query_key_value",
        "bloom": "query_key_value",
        "falcon7b": "query_key_value",
        "falcon_rw": "query_key_value",
        "deepseek_v2": "kv_b_proj",
        "deepseek_v2_lite": "kv_b_proj",
    }
    assert {name.split(".")[-2] for name in unsure} == ({by_head[family]} if family in by_head else set())


@pytest.mark.parametrize("family", anatomy_cases.FAMILIES)
def test_head_by_head(family):
    """Heads are contiguous rows of queries, keys and values, and columns of the output projection."""
    case = anatomy_cases.case(family)
    found = anatomy.read(shapes(case), case.config)
    planted = {(p.tensor, p.role): p.matrix for p in case.planted}
    seen = 0
    for part in found:
        if part.role not in ("query", "key", "value", "output"):
            continue
        whole = planted[part.name, part.role]
        heads = found.heads(part)
        assert len(heads) == part.heads and part.heads * part.head_dim == whole.shape[part.role == "output"]
        taken = [head.block.take(case.tensors[part.name]) for head in heads]
        assert all(head.shape == matrix.shape for head, matrix in zip(heads, taken))
        np.testing.assert_array_equal(np.concatenate(taken, axis=int(part.role == "output")), whole)
        seen += 1
    assert seen
    query = found.by_role["query"][0]
    assert query.heads == anatomy_cases.HEADS


@pytest.mark.parametrize("prefix", ["", "model.", "module.", "_orig_mod.", "base_model.model.", "a.b.c.model."])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "bert", "t5", "whisper", "mixtral"])
def test_any_prefix(family, prefix):
    case = anatomy_cases.case(family)
    plain = anatomy.read(shapes(case), case.config)
    moved = anatomy.read({prefix + name: shape for name, shape in shapes(case).items()}, case.config)
    assert [(p.role, p.layer, p.stack, p.block) for p in plain] == [(p.role, p.layer, p.stack, p.block) for p in moved]


@pytest.mark.parametrize("family, prefix", [("gpt2", "transformer."), ("bloom", "transformer."), ("bert", "bert.")])
def test_missing_prefix(family, prefix):
    case = anatomy_cases.case(family)
    bare = {name.removeprefix(prefix): tensor for name, tensor in case.tensors.items()}
    found = anatomy.read({name: tensor.shape for name, tensor in bare.items()}, case.config)
    for planted in case.planted:
        (part,) = [p for p in found[planted.tensor.removeprefix(prefix)] if p.role == planted.role]
        np.testing.assert_array_equal(part.block.take(bare[part.name]), planted.matrix)
