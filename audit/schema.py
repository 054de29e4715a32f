"""An object against its row of tables.py, and an event by its name in the grammar.

    JSON object --Typed()--> the same object without members of a wrong type, which reads without asking
                             .faults: a line for each member that is missing, or has a wrong type
    event --label()--> its name in GRAMMAR        (state, label) --GRAMMAR--> the next state

Authority: that of tables.py.

Rules of this file:
1. An item whose `type` is message has the members of the row "item" and those of "item message", which goes
   first. What stands in "item" can be read of any item.
2. Items come one after the other, but for those of hosted tools: of these several may be open side by side.

Not here: what the members must say (events.py, chunks.py).
"""

import json
import re
import time  # for LATEST alone
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from audit.tables import HOSTED, OBJECTS, ORDERED, VALUES

Json = dict[str, Any]
Members = dict[str, str]  # name -> type; the name has a "?" if it may be absent
Faults = Iterator[tuple[int, str]]  # (number of an event, what is wrong with it)

LATEST = time.time() + 24 * 60 * 60  # a time that has passed, whatever clock a server has

BASIC = dict(re.findall(r"(\w+) +(.*)", VALUES))
ROWS: dict[str, dict[str, Members]] = {}  # kind -> type -> its row; "*": the row of all objects of the kind


def row_of(text: str) -> Members:
    return {name: type_ or "text" for name, type_ in re.findall(r"(\w+\??):?(\S*)", text)}


for _kind, _type, _row in re.findall(r"(\w+) *(.*?) *= (.*)", re.sub("\n +", " ", OBJECTS)):
    ROWS.setdefault(_kind, {})[_type or "*"] = row_of(_row)
EVENTS = ROWS["event"]


# --- which event may follow which ---------------------------------------------------------------------------


def grammar(rows: str) -> dict[tuple[str, str], str]:
    found = re.findall(r"^(\S.*?)  +(.*?)  +(.*)$", rows, re.MULTILINE)
    return {(state, event): then for state, event, then in found}


BESIDE = grammar(HOSTED)
GRAMMAR = grammar(ORDERED) | BESIDE
# The state after an event that came out of order.
AFTER = {event: state for (_, event), state in GRAMMAR.items()}


def label(event: "Typed") -> str:
    """Name an event as GRAMMAR does: its type, and the type of the item or part that it opens or ends."""
    inner = event.item or event.part
    return f"{event.type} {inner.type}" if inner else f"{event.type}"


# --- objects against their table ----------------------------------------------------------------------------

EMPTY: list[Any] = [None, "", [], {}]  # what an absent member reads as: the first that has its type
WRONG = object()  # in place of a value of another type


class Typed(dict[str, Any]):
    """An object without members of another type than its table says, at any depth.

    Members are attributes too. An absent one reads as what is empty: "", [], {} or None.
    `faults` has a line for each member that the object, or one in it, lacks or has of another type.
    """

    def __init__(self, value: Json, kind: str) -> None:
        super().__init__()
        what = str(value.get("type") or f"the {kind}")
        self.types, needed = types_of(kind, what)
        self.faults = [f"{what} lacks {name}" for name in needed if name not in value]
        for name, member in value.items():
            type_ = self.types.get(name, "any")
            fitted = fit(member, type_)
            if fitted is not WRONG:
                self[name] = fitted
                for inner in fitted if isinstance(member, list) else [fitted]:
                    self.faults += getattr(inner, "faults", [])
            elif member is not None or name in needed:
                self.faults.append(f"{what} has {name} {shortened(member)}: expected {type_}")

    def __missing__(self, name: str) -> Any:
        type_ = self.types.get(name, "any")
        return next((value for empty in EMPTY if (value := fit(empty, type_)) is not WRONG), "")

    def __getattr__(self, name: str) -> Any:
        return self[name]


@lru_cache
def types_of(kind: str, type_: str) -> tuple[Members, list[str]]:
    """Return the types of the members of an object, and the names of those that it must have."""
    row = ROWS[kind]["*"] | ROWS[kind].get(type_, {})
    return {name.removesuffix("?"): of for name, of in row.items()}, [name for name in row if name[-1] != "?"]


def object_in(value: Json, name: str) -> Json:
    """Return the object that a member is; {} for anything else."""
    member = value.get(name)
    return member if isinstance(member, dict) else {}


def faults_in(value: Json, kind: str) -> list[str]:
    """Return the faults of an object; in place of its kind a row may be given."""
    ROWS.setdefault(kind, {"*": row_of(kind)})
    return Typed(value, kind).faults


def expect_members(value: Json, kind: str) -> None:
    """Expect an object to be as its table says; raises AssertionError."""
    faults = faults_in(value, kind)
    assert not faults, "; ".join(faults)


def fit(value: Any, type_: str) -> Any:
    """Return the value if it has the type, else WRONG; objects without their members of a wrong type."""
    for one in type_.split("|"):
        if one in ROWS and isinstance(value, dict):
            return Typed(value, one)
        if one.startswith("[") and isinstance(value, list):
            entries = [fit(entry, one[1:-1]) for entry in value]
            return WRONG if WRONG in entries else entries
        if one.startswith("+") and isinstance(value, list):
            fitting = [entry for entry in value if not getattr(fit(entry, one[1:]), "faults", [entry])]
            return value if fitting else WRONG
        text = value if isinstance(value, str) or one[:1] != "=" else json.dumps(value)
        if one in ("any", f"={text}") or type(value).__name__ in BASIC.get(one, "").split():
            return WRONG if (one == "id" and not value) or (one == "time" and value > LATEST) else value
    return WRONG


def unfit(value: Json, row: Members) -> list[str]:
    """Return a line for each member that the object has and that is not as the row says."""
    return [
        f"expected {name} {type_.strip('=') or 'empty'}, got {shortened(value[name])}"
        for name, type_ in row.items()
        if name in value and fit(value[name], type_) is WRONG
    ]


def without(value: Any, *names: str) -> Any:
    """Leave out the members of these names, and those that are null: null and absent mean the same."""
    if isinstance(value, list):
        return [without(entry, *names) for entry in value]
    if isinstance(value, dict):
        return {
            name: without(inner, *names)
            for name, inner in value.items()
            if name not in names and inner is not None
        }
    return value


# --- text ---------------------------------------------------------------------------------------------------


def shortened(value: object, length: int = 200) -> str:
    """Show a value as it came: a text, bytes, or JSON."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= length:
        return text
    return f"{text[: length // 2]}...{text[-length // 2 :]}"


def printable(text: str) -> str:
    """Write out what a terminal would obey, and what XML cannot say."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
