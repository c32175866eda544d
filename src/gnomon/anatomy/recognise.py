"""Which family a stack belongs to: what the config says, checked by shapes; else what names and shapes say.

Every row of the table that explains the same weights is asked. Where the rows agree there is nothing to
decide; where they differ, shapes strike out those that cannot be; what is still open after that is said.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gnomon.anatomy.families import FAMILIES, GPT_BIGCODE, INSIDE, OPT, OPT_POST_NORM, Family, family_of_type
from gnomon.anatomy.matrices import Open, expert_orientation, matrices_in
from gnomon.anatomy.stack import Stack
from gnomon.anatomy.unlisted_families import STRUCTURAL, structural_family, width_by_words


@dataclass(frozen=True)
class Recognition:
    """How to read a stack.

    Attributes:
        family: the row to read it by.
        evidence: how it was found, in words.
        norms_known: whether what the row says about which norm feeds what holds.
        norm_offset: norms multiply by this plus their gain; None when names alone do not tell.
        open: path inside the layer -> what could not be decided about the weight there.
    """

    family: Family
    evidence: str
    norms_known: bool = True
    norm_offset: float | None = None
    open: dict[str, Open] = field(default_factory=dict)


def recognise(stack: Stack) -> Recognition:
    """Find the family of `stack`, from its config where that names one and shapes agree.

    Weights that the family's row does not have are read as those of unlisted families are.
    """
    found = _recognise(stack)
    more = structural_family(stack).roles if found.family.name != STRUCTURAL else {}
    new = {path: entry for path, entry in more.items() if path not in found.family.roles and path not in INSIDE}
    return replace(found, family=replace(found.family, roles={**found.family.roles, **new})) if new else found


def _recognise(stack: Stack) -> Recognition:
    model_type = stack.config.get("model_type")
    named = family_of_type(model_type)
    if named is OPT and stack.config.get("do_layer_norm_before") is False:
        named = OPT_POST_NORM
    if named is not None and not named.roles.keys() & stack.samples.keys():
        named = None
    if named is not None and not _contradicted(stack, named):
        evidence = f"{stack.name}: {model_type!r} by its config"
        return Recognition(named, evidence, norm_offset=named.norm_offset)

    total = len(stack.samples)
    candidates = _candidates(stack, model_type)
    if candidates:
        first = candidates[0]
        known = len(first.roles.keys() & stack.samples.keys())
        evidence = f"{stack.name}: {first.name!r} by names and shapes ({known} of {total} weights)"
        if named is not None:
            evidence += f"; its config says {model_type!r}, which the shapes contradict"
        elif model_type is not None:
            evidence += f"; its config says {model_type!r}, which is not in the table for these names"
        same_norms = all((family.before, family.after) == (first.before, first.after) for family in candidates)
        # Models that the table does not know may store gain - 1 under the same names.
        plain = model_type is None and all(family.norm_offset == 0.0 for family in candidates)
        return Recognition(first, evidence, same_norms, 0.0 if plain else None, _differences(stack, candidates))
    if named is not None:
        evidence = f"{stack.name}: {model_type!r} by its config, though some shapes contradict it"
        return Recognition(named, evidence, norm_offset=named.norm_offset)

    if not stack.width_is_told:
        stack.width = width_by_words(stack) or stack.width
    family = structural_family(stack)
    known = len(family.roles)
    return Recognition(family, f"{stack.name}: {STRUCTURAL} ({known} of {total} weights named)", norms_known=False)


def _candidates(stack: Stack, model_type: str | None) -> list[Family]:
    """The rows that explain most of the weights, and whose reading the shapes allow. In table order."""
    paths = stack.samples.keys()
    scores = {family.name: len(family.roles.keys() & paths) for family in FAMILIES}
    for score in sorted(set(scores.values()), reverse=True):
        # A row that leaves much unexplained fits by accident: most decoders call something self_attn.q_proj.
        if score == 0 or score < 0.6 * len(paths):
            break
        fitting = [f for f in FAMILIES if scores[f.name] == score and not _contradicted(stack, f)]
        if any(member.tensor.kind == "linear" for member in stack.samples.values()) and len(fitting) > 1:
            # A live GPTBigCode says so in its config; another module under GPT-2's names stacks its thirds, as nanoGPT does.
            fitting = [f for f in fitting if f is not GPT_BIGCODE or model_type]
        if fitting:
            norms = [_norms_present(stack, family) for family in fitting]
            return [family for family, n in zip(fitting, norms) if n == max(norms)]
    return []


def _contradicted(stack: Stack, family: Family) -> bool:
    """Whether shapes rule the family out: a width that is not the stream's, or an MLP that does not close."""
    oriented = expert_orientation(stack, family)
    inner: dict[tuple[int | None, int | None], set[int]] = {}
    for template, member in stack.samples.items():
        if template not in family.roles:
            continue
        for matrix in matrices_in(member, stack, family, oriented):
            if matrix.in_axis is None:
                continue
            if not matrix.fits or _wrong_side(family, template, oriented):
                return True
            if matrix.role in ("gate", "up", "down") and not member.at.adapter:
                width = matrix.shape[1] if matrix.role == "down" else matrix.shape[0]
                inner.setdefault((member.at.layer, matrix.expert), set()).add(width)
    return any(len(widths) > 1 for widths in inner.values())


def _wrong_side(family: Family, template: str, oriented: bool | None) -> bool:
    entry = family.roles[template]
    if isinstance(entry, str) or not entry.experts or entry.transposed is None or oriented is None:
        return False
    return entry.transposed != oriented


def _differences(stack: Stack, candidates: list[Family]) -> dict[str, Open]:
    """Paths at which the candidates read the same tensor differently."""
    found = {}
    readings = {f.name: expert_orientation(stack, f) for f in candidates}
    for template, member in stack.samples.items():
        told = {
            family.name: matrices_in(member, stack, family, readings[family.name])
            for family in candidates
            if template in family.roles
        }
        if len({tuple((m.role, m.block) for m in matrices) for matrices in told.values()}) > 1:
            roles = {"+".join(dict.fromkeys(m.role for m in matrices)) for matrices in told.values()}
            sides = {matrices[0].block.transposed for matrices in told.values()}
            found[template] = Open(
                role=roles.pop() if len(roles) == 1 else None,
                transposed=sides.pop() if len(sides) == 1 else None,
                why=f"{', '.join(told)} store this differently; say which with config={{'model_type': …}}",
            )
    return found


def _norms_present(stack: Stack, family: Family) -> int:
    paths = {path for where in (family.before, family.after) for value in where.values() for path in value.split()}
    layers = {at.layer for _, at in stack.members}
    return sum(any(stack.norm(layer, path) for layer in list(layers)[:2]) for path in paths)
