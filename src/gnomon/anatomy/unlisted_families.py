"""Families the table does not know: roles by the words people use, checked against shapes.

A word counts only where its shape agrees. What no word names stays unknown, and a fused tensor stays whole,
since nothing says in which order its rows lie.
"""

from __future__ import annotations

import re
from collections import Counter

from gnomon.anatomy.families import Entry, Family, Weight
from gnomon.anatomy.roles import ROLES
from gnomon.anatomy.stack import Member, Stack

STRUCTURAL = "unknown (structural)"

_ATTENTION_WORDS = {
    "query": "q query q_proj query_proj project_q q_lin q_linear wq w_q to_q c_q linear_q",
    "key": "k key k_proj key_proj project_k k_lin k_linear wk w_k to_k c_k linear_k",
    "value": "v value v_proj value_proj project_v v_lin v_linear wv w_v to_v c_v linear_v",
    "output": "o out output proj dense o_proj out_proj output_proj out_lin wo w_o to_out c_proj linear_out",
    "query+key+value": "qkv qkv_proj wqkv to_qkv c_attn query_key_value in_proj w_pack linear_qkv",
}
# Outside a module called attention, only words that nothing else is called.
_CLEAR_WORDS = {
    "query": "q_proj query_proj q_lin wq to_q c_q",
    "key": "k_proj key_proj k_lin wk to_k c_k",
    "value": "v_proj value_proj v_lin wv to_v c_v",
    "output": "o_proj out_lin wo to_out",
    "query+key+value": "qkv qkv_proj wqkv to_qkv query_key_value",
}
_MLP_WORDS = {
    "gate": "gate gate_proj w_gate",
    "up": "up up_proj fc1 fc_in c_fc lin1 linear1 linear_1 wi w_in w_up dense_h_to_4h",
    "down": "down down_proj fc2 fc_out c_proj lin2 linear2 linear_2 w_out w_down dense_4h_to_h",
    "gate+up": "gate_up gate_up_proj",
}
_MIXER_WORDS = {"mixer_in": "in_proj", "mixer_out": "out_proj"}
_CROSS = re.compile(r"cross|enc_?dec|encoder_attn|multihead_attn", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention|(?:^|\.)mha", re.IGNORECASE)
_MIXER = re.compile(r"mamba|mixer|ssm|linear_attn|(?:^|\.)conv", re.IGNORECASE)
_GENERIC = ("linear", "fc", "dense", "lin", "")


def structural_family(stack: Stack) -> Family:
    """A row made up for this stack: only the paths whose word and shape agree."""
    words = {template: _word(template, stack) for template in stack.samples}
    transposed = _orientation(stack, words)
    roles: dict[str, Entry] = {}
    for template, role in words.items():
        member = stack.samples[template]
        if role is None or len(member.tensor.shape) != 2 or not _fits(member, role, stack.width, transposed):
            continue
        if "+" in role:
            roles[template] = Weight(tuple(role.split("+")), "unordered")
        elif member.tensor.kind or transposed is not None:
            roles[template] = role
        else:
            roles[template] = Weight((role,), "unoriented")
    return Family(STRUCTURAL, roles=roles, transposed=bool(transposed), stack="main")


def _word(template: str, stack: Stack) -> str | None:
    """The role that a path's last telling word names, in the light of the words before it."""
    segments = [segment for segment in template.split(".") if segment != "#"]
    if (segments or [""])[-1].lower() in _GENERIC:
        if len(stack.samples) == 1:
            shape = next(iter(stack.samples.values())).tensor.shape
            return "linear" if len(shape) == 2 and shape[0] == shape[1] else None
        segments = segments[:-1] if len(segments) > 1 and segments[-1].lower() == "linear" else segments
    last, before = segments[-1].lower() if segments else "", ".".join(segments[:-1])
    cross = bool(_CROSS.search(before))
    if cross:
        words = _ATTENTION_WORDS
    elif _MIXER.search(before):
        words = _MIXER_WORDS
    elif _ATTENTION.search(before):
        words = _ATTENTION_WORDS
    else:
        words = _CLEAR_WORDS | _MLP_WORDS
    role = next((role for role, names in words.items() if last in names.split()), None)
    return "+".join(f"cross_{one}" for one in role.split("+")) if role and cross else role


def _orientation(stack: Stack, words: dict[str, str | None]) -> bool | None:
    """Whether bare weights lie in x out, by those of them that are not square; None when they disagree."""
    votes: Counter[bool] = Counter()
    for template, role in words.items():
        shape = stack.samples[template].tensor.shape
        if role is None or len(shape) != 2 or shape[0] == shape[1] or stack.width not in shape:
            continue
        habit = ROLES[role.split("+")[0]]
        if habit.reads != habit.writes:
            votes[(shape[0] == stack.width) == habit.reads] += 1
    return next(iter(votes)) if len(votes) == 1 else None


def _fits(member: Member, role: str, width: int | None, transposed: bool | None) -> bool:
    out, inputs = member.tensor.shape
    if member.tensor.kind == "conv1d" or (not member.tensor.kind and transposed):
        out, inputs = inputs, out
    habit = ROLES[role.split("+")[0]]
    return width is None or not (habit.reads and inputs != width or habit.writes and out != width)
