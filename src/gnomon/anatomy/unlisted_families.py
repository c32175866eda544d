"""Families the table does not know: roles by the words people use, checked against shapes and neighbours.

A word counts only where its shape agrees, and an MLP's only where gate, up and down close: what gate and up give is what
down takes. What no word names stays unknown, and a fused tensor stays whole, since nothing says in which order its rows
lie.
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
    "gate": "gate gate_proj w_gate proj_up_gate linear_gate",
    "up": "up up_proj fc1 fc_in c_fc lin1 linear1 linear_1 wi w_in w_up proj_up linear_up dense_h_to_4h",
    "down": "down down_proj fc2 fc_out c_proj lin2 linear2 linear_2 w_out w_down proj_down linear_down dense_4h_to_h",
    "gate+up": "gate_up gate_up_proj",
}
_INSIDE_MLP = {"down": "wo", "gate": "w1", "up": "w3"}  # w1, w2, w3 as Llama has them; only together
_MIXER_WORDS = {"mixer_in": "in_proj", "mixer_out": "out_proj"}
_ROUTERS = re.compile(r"(?:^|[._])router(?:$|\.)|(?:^|\.)gate\.wg$")
_CROSS = re.compile(r"cross|enc_?dec|encoder_attn|multihead_attn", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention|(?:^|\.)mha", re.IGNORECASE)
_MIXER = re.compile(r"mamba|mixer|ssm|linear_attn|(?:^|\.)conv", re.IGNORECASE)
_MLP = re.compile(r"mlp|ffn|feed_?forward|expert|moe|(?:^|\.)ff(?:\.|$)", re.IGNORECASE)
_EXPERTS = re.compile(r"(?:^|\.)(?:\w*_)?experts(?:\.|$)")
_SHARED = re.compile(r"shared_?(?:expert|mlp)", re.IGNORECASE)
_GENERIC = ("linear", "fc", "dense", "lin", "")


def structural_family(stack: Stack) -> Family:
    """A row made up for this stack: only the paths whose word and shape agree."""
    words = _words(stack)
    transposed = _orientation(stack, words)
    words = _closed(stack, words)
    roles: dict[str, Entry] = {}
    for template, role in words.items():
        member = stack.samples[template]
        if not _fits(member, role, stack.width, transposed):
            continue
        if "+" in role:
            roles[template] = Weight(tuple(role.split("+")), "unordered")
        elif member.tensor.kind or transposed is not None:
            roles[template] = role
        else:
            roles[template] = Weight((role,), "unoriented")
    return Family(STRUCTURAL, roles=roles, transposed=bool(transposed), stack="main")


def _words(stack: Stack) -> dict[str, str]:
    return {template: role for template in stack.samples if (role := _word(template, stack)) is not None}


def _word(template: str, stack: Stack) -> str | None:
    """The role that a path's last telling word names, in the light of the words before it."""
    shape = stack.samples[template].tensor.shape
    if len(shape) != 2:
        return None
    segments = [segment for segment in template.split(".") if segment != "#"]
    if (segments or [""])[-1].lower() in _GENERIC:
        if len(stack.samples) == 1:
            return "linear" if shape[0] == shape[1] else None
        segments = segments[:-1] if len(segments) > 1 and segments[-1].lower() == "linear" else segments
    last, before = segments[-1].lower() if segments else "", ".".join(segments[:-1])
    if _ROUTERS.search(template) or (last == "classifier" and _ROUTERS.search(before)):
        return "router"
    cross = bool(_CROSS.search(before))
    if cross:
        words = _ATTENTION_WORDS
    elif _MIXER.search(before) and not _has_queries(template, stack):
        words = _MIXER_WORDS
    elif _MLP.search(before) and not _ATTENTION.search(before.rpartition(".")[2]):
        words = _MLP_WORDS | {role: f"{_MLP_WORDS[role]} {word}" for role, word in _INSIDE_MLP.items()}
        words["down"] += " w2"
    elif _ATTENTION.search(before) or _MIXER.search(before):
        words = _ATTENTION_WORDS
    else:
        words = _CLEAR_WORDS | _MLP_WORDS
    if last == "wo" and any(path.rpartition(".")[2].startswith("wi") for path in _beside(template, stack)):
        return "down"
    role = next((role for role, names in words.items() if last in names.split()), None)
    if last in ("w1", "w2", "w3") and not all(template[:-1] + n in stack.samples for n in "123"):
        return None
    if last == "gate" and any(_EXPERTS.match(path[len(template) - 4 :]) for path in _beside(template, stack)):
        return "router"
    return "+".join(f"cross_{one}" for one in role.split("+")) if role and cross else role


def _beside(template: str, stack: Stack) -> list[str]:
    """Paths in the module that holds this one."""
    parent = template.rpartition(".")[0]
    return [path for path in stack.samples if path.startswith(f"{parent}." if parent else "")]


def _has_queries(template: str, stack: Stack) -> bool:
    """Whether the module that holds this weight holds queries as well, so that a mixer is attention by another name."""
    words = f"{_ATTENTION_WORDS['query']} {_ATTENTION_WORDS['query+key+value']}".replace("in_proj", "").split()
    return any(path.rpartition(".")[2].lower() in words for path in _beside(template, stack))


def width_by_words(stack: Stack) -> int | None:
    """The one width that all readers take and all writers give when weights are stored out x in, if no MLP is narrower."""
    said, words = set(), _words(stack)
    for template, role in words.items():
        out, inputs = stack.samples[template].tensor.shape
        habit = ROLES[role.split("+")[0]]
        if habit.reads != habit.writes and stack.samples[template].tensor.kind != "conv1d":
            said.add(inputs if habit.reads else out)
    narrow = said and all(min(stack.samples[path].tensor.shape) <= min(said) for path in words)
    return said.pop() if len(said) == 1 and narrow else None


def _closed(stack: Stack, words: dict[str, str]) -> dict[str, str]:
    """The words that hold once each MLP is looked at as a whole.

    Gate and up beside a down projection have as many rows as it has inputs; up with twice as many holds a gate as well;
    any other "gate" is none. Experts that all tokens visit are told by their module's name.
    """

    def inner(template: str) -> int:
        first, second = stack.samples[template].tensor.shape
        return second if first == stack.width else first

    downs = {path.rpartition(".")[0]: inner(path) for path, role in words.items() if role == "down"}
    found = {}
    for template, role in words.items():
        parent = template.rpartition(".")[0]
        if role in ("gate", "up", "gate+up") and parent in downs:
            rows, wanted = inner(template), downs[parent]
            alone = not any(path.rpartition(".")[0] == parent and words[path] == "gate" for path in words)
            if role == "up" and rows == 2 * wanted and alone:
                role = "gate+up"
            elif rows != (2 * wanted if role == "gate+up" else wanted):
                continue
        elif role == "gate" and downs:
            continue
        if _SHARED.search(template) and role in ("gate", "up", "down"):
            role = f"shared_{role}"
        found[template] = role
    return found


def _orientation(stack: Stack, words: dict[str, str]) -> bool | None:
    """Whether bare weights lie in x out, by those of them that are not square; None when they disagree."""
    votes: Counter[bool] = Counter()
    for template, role in words.items():
        shape = stack.samples[template].tensor.shape
        if shape[0] == shape[1] or stack.width not in shape:
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
