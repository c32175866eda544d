"""How the rows of a fused tensor are shared out among its roles.

A layout takes the roles in stored order, the number of rows and the `Facts` of the layer, and returns
`Piece`s that together cover every row once. When the facts do not decide, it raises `Undecided` with what
is missing, and `Impossible` when they speak against the layout: rows are never shared out by a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from gnomon.anatomy.block import Cut


class Undecided(Exception):
    """The split needs a fact that neither shapes nor config give."""


class Impossible(Exception):
    """The rows cannot be packed this way: another family, or the config of another model."""


class Piece(NamedTuple):
    role: str
    rows: Cut | None
    heads: int | None = None
    head_dim: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known about one layer.

    Attributes:
        heads, kv_heads, head_dim: from the config.
        value_dim: width of one head's value (MLA), from the config.
        attention_width: inputs of the attention's output projection, from its shape.
        mlp_width: inputs of the MLP's down projection, from its shape.
        latent: width of the key-value latent (MLA), from the shape of kv_b or the config.
        width: width of the residual stream.
    """

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    attention_width: int | None = None
    mlp_width: int | None = None
    latent: int | None = None
    width: int | None = None


def whole(roles: tuple[str, ...], rows: int, facts: Facts) -> list[Piece]:
    """One role owns every row."""
    (role,) = roles
    heads = head_dim = None
    if role in ("query", "cross_query") and facts.heads and rows % facts.heads == 0:
        heads, head_dim = facts.heads, rows // facts.heads
    elif role in ("key", "value", "cross_key", "cross_value"):
        head_dim = _head_dim(facts)
        heads = rows // head_dim if head_dim and rows % head_dim == 0 else None
    return [Piece(role, None, heads, head_dim if heads else None)]


def stacked(roles: tuple[str, ...], rows: int, facts: Facts) -> list[Piece]:
    """One role after the other. Q may have more rows than K and V; any other roles share equally."""
    if not roles[0].endswith("query"):
        return _runs(roles, [_share(rows, len(roles), roles)] * len(roles), rows)
    query = facts.attention_width or _product(facts.heads, facts.head_dim)
    if query is None and facts.heads and facts.kv_heads:
        query = facts.heads * _share(rows, facts.heads + 2 * facts.kv_heads, roles)
    if query is None:
        raise Undecided("the number of heads is needed to share these rows out; give the model's config")
    if query >= rows or (rows - query) % 2:
        raise Impossible(f"{rows} rows do not hold {query} of queries and two equal parts of keys and values")
    head_dim = query // facts.heads if facts.heads and query % facts.heads == 0 else None
    return _runs(roles, [query, (rows - query) // 2, (rows - query) // 2], rows, head_dim)


def stacked_if_double(roles: tuple[str, ...], rows: int, facts: Facts) -> list[Piece]:
    """Gate and up when there are twice as many rows as the down projection has inputs, up alone otherwise."""
    if facts.mlp_width is None:
        raise Undecided("the down projection is missing, so the rows may hold a gate or not")
    return stacked(roles, rows, facts) if rows == 2 * facts.mlp_width else [Piece(roles[-1], None)]


def by_head(roles: tuple[str, ...], rows: int, facts: Facts) -> list[Piece]:
    """Per head, an equal share for each role: (heads, roles, head_dim)."""
    if facts.attention_width and rows != len(roles) * facts.attention_width:
        raise Impossible(f"{rows} rows are not {len(roles)} times the width of attention, {facts.attention_width}")
    heads = _known(facts.heads, "heads")
    share = _share(rows, heads * len(roles), roles)
    return _groups(roles, [share] * len(roles), rows, share)


def gated_by_head(roles: tuple[str, ...], rows: int, facts: Facts) -> list[Piece]:
    """Qwen3-Next: per head, the query rows and those of its output gate. Their heads are together wider than the stream."""
    if not facts.attention_width and facts.width and rows <= facts.width:
        raise Impossible(f"{rows} rows are too few for queries and gates beside a stream of {facts.width}")
    return by_head(roles, rows, facts)


def by_group(roles: tuple[str, ...], rows: int, facts: Facts) -> list[Piece]:
    """Per key head: the queries that share it, the key, the value: (kv_heads, heads / kv_heads + 2, head_dim)."""
    heads = _known(facts.heads, "heads")
    kv_heads = facts.kv_heads or heads
    head_dim = _share(rows, heads + 2 * kv_heads, roles)
    if heads % kv_heads:
        raise Impossible(f"{heads} heads cannot be grouped over {kv_heads} key heads")
    return _groups(roles, [heads // kv_heads * head_dim, head_dim, head_dim], rows, head_dim)


def shards(roles: tuple[str, ...], rows: int, facts: Facts) -> list[Piece]:
    """CodeGen: four shards (it was trained on four TPU cores), each with an equal share for each role."""
    share = _share(rows, 4 * len(roles), roles)
    heads = facts.heads
    head_dim = rows // len(roles) // heads if heads and rows % (len(roles) * heads) == 0 else None
    return _groups(roles, [share] * len(roles), rows, head_dim)


def alternating(roles: tuple[str, ...], rows: int, facts: Facts) -> list[Piece]:
    """Row by row in turn: even rows the gate, odd rows up."""
    _share(rows, len(roles), roles)
    return _groups(roles, [1] * len(roles), rows)


def latent_rope(roles: tuple[str, ...], rows: int, facts: Facts) -> list[Piece]:
    """MLA kv_a: the key-value latent, then the rotary key that all heads share."""
    latent = _known(facts.latent, "rows of the key-value latent (kv_lora_rank)")
    if not latent < rows:
        raise Impossible(f"a latent of {latent} leaves no rows of {rows} for the rotary key")
    return _runs(roles, [latent, rows - latent], rows)


def nope_value(roles: tuple[str, ...], rows: int, facts: Facts) -> list[Piece]:
    """MLA kv_b: per head, the key rows without rotation, then the value rows."""
    heads = _known(facts.heads, "heads")
    value = facts.attention_width // heads if facts.attention_width else _known(facts.value_dim, "value rows per head")
    key = _share(rows, heads, roles) - value
    if key <= 0:
        raise Impossible(f"{rows} rows for {heads} heads leave no key rows beside {value} value rows")
    pieces = _groups(roles, [key, value], rows)
    return [piece._replace(heads=heads, head_dim=width) for piece, width in zip(pieces, (key, value))]


def unordered(roles: tuple[str, ...], rows: int, facts: Facts) -> list[Piece]:
    """A fused tensor of an unknown family."""
    raise Undecided(f"the order of {', '.join(roles)} in these rows is not known for this family")


Layout = Callable[[tuple[str, ...], int, Facts], list[Piece]]
LAYOUTS: dict[str, Layout] = {
    layout.__name__: layout
    for layout in (
        *(
            whole,
            stacked,
            stacked_if_double,
            by_head,
            gated_by_head,
            by_group,
            shards,
            alternating,
            latent_rope,
            nope_value,
        ),
        unordered,
    )
}


def _groups(roles: tuple[str, ...], widths: list[int], rows: int, head_dim: int | None = None) -> list[Piece]:
    """Pieces of `widths` rows, repeated until the rows are used up."""
    period, start, pieces = sum(widths), 0, []
    for role, width in zip(roles, widths, strict=True):
        cut = Cut(period, start, start + width)
        kept = cut.count(rows)
        heads = kept // head_dim if head_dim and kept % head_dim == 0 else None
        pieces.append(Piece(role, cut, heads, head_dim if heads else None))
        start += width
    return pieces


def _runs(roles: tuple[str, ...], widths: list[int], rows: int, head_dim: int | None = None) -> list[Piece]:
    assert sum(widths) == rows, (widths, rows)
    return _groups(roles, widths, rows, head_dim)


def _share(rows: int, parts: int, roles: tuple[str, ...]) -> int:
    if rows % parts:
        raise Impossible(f"{rows} rows do not divide into {parts} equal parts for {' + '.join(roles)}")
    return rows // parts


def _known(value: int | None, what: str) -> int:
    if value is None:
        raise Undecided(f"the number of {what} is needed to share these rows out; give the model's config")
    return value


def _product(a: int | None, b: int | None) -> int | None:
    return a * b if a and b else None


def _head_dim(facts: Facts) -> int | None:
    if facts.attention_width and facts.heads and facts.attention_width % facts.heads == 0:
        return facts.attention_width // facts.heads
    return facts.head_dim
