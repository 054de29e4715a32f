"""Checks: the allowed values in a request's JSON, as functions that are combined.

    (value, its path) --Check--> the value as we use it, or BadInput

    list_of(integer(0, 9))([1, 12], "stop_token_ids")
      --> Invalid value for 'stop_token_ids[1]': expected an integer from 0 to 9, got 12.

Authority: RFC 8259, section 3, for the types; openai-openapi for the limits that the callers state.

Rules of this file:
1. Types are JSON's and nothing is converted: true is not a number, 1.0 is not an integer, "5" is neither.
2. A check of a list or an object hands each part to the part's own check, with the part's own path: an error
   names the innermost value that is wrong.
"""

from collections.abc import Callable
from functools import partial
from operator import pos
from typing import Any, NamedTuple

from request.refusals import missing, unsupported, wrong_value
from sse import Object

Check = Callable[[Any, str], Any]  # (value, its path) -> the value as we use it; raises BadInput


def makes_checks(rule: Callable[..., Any]) -> Callable[..., Check]:
    """Turn `rule(value, path, *limits)` into a maker of checks: `one_of(*words)` returns a Check."""
    return lambda *limits, **checks: lambda value, path: rule(value, path, *limits, **checks)


# --- scalars ------------------------------------------------------------------------------------------------


@makes_checks
def of_type(value: Any, path: str, expected: str, *types: type) -> Any:
    """Accept any value of these types: only the size of the body limits it."""
    if value is None:
        raise missing(path)
    if type(value) not in types:  # to isinstance(), true is an integer
        raise wrong_value(path, expected, value, "type")
    return value


boolean = of_type("a boolean", bool)
text = of_type("a string", str)
array = of_type("an array", list)
text_or_array = of_type("a string or an array", str, list)
mapping = of_type("an object", dict)


@makes_checks
def bounded(
    value: Any, path: str, check: Check, size: Callable[[Any], float], expected: str, low: float, high: float
) -> Any:
    """Accept a value whose size lies within these limits."""
    if not low <= size(check(value, path)) <= high:  # NaN is in no range
        raise wrong_value(path, f"{expected} from {low} to {high}", value)
    return value


number = partial(bounded, of_type("a number", int, float), pos, "a number")
string = partial(bounded, text, len, "a string with a length")


# --- lists and objects --------------------------------------------------------------------------------------


@makes_checks
def list_of(value: Any, path: str, check_item: Check, max_items: int = 1024) -> list[Any]:
    items = bounded(array, len, "a number of items", 0, max_items)(value, path)
    return [check_item(item, f"{path}[{i}]") for i, item in enumerate(items)]


class Place(NamedTuple):
    """An object in a request, and its path."""

    members: Object
    path: str

    def need(self, name: str, check: Check) -> Any:
        """Return a checked member, which the object must have."""
        return check(self.members.get(name), f"{self.path}.{name}")

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def get(self, name: str, check: Check, default: Any) -> Any:
        """Return a checked member, the default if it is null or empty."""
        return self.need(name, check) if self.members.get(name) else default


def place(value: Any, path: str) -> Place:
    """Accept an object with any members."""
    return Place(mapping(value, path), path)


@makes_checks
def one_of(value: Any, path: str, *allowed: str) -> Any:
    if text(value, path) not in allowed:
        raise wrong_value(path, "one of " + ", ".join(map(repr, allowed)), value)
    return value


# --- the fold: a plain streamed request passes what stands above --------------------------------------------


# --- scalars ------------------------------------------------------------------------------------------------

text_or_object = of_type("a string or an object", str, dict)
integer = partial(bounded, of_type("an integer", int), pos, "an integer")


def hint(value: Any, path: str) -> Any:
    """Accept any value, since the enums of hints grow monthly; only that it came is kept."""
    return ""


# --- lists and objects --------------------------------------------------------------------------------------


@makes_checks
def members(value: Any, path: str, *absent: Object, **checks: Check) -> Object:
    """Accept an object; drop members that are null, or not named here, and fill in those that are absent."""
    given = mapping(value, path)
    present = [name for name in checks if given.get(name) is not None]
    return dict(*absent) | {name: checks[name](given[name], f"{path}.{name}") for name in present}


@makes_checks
def pairs_of(value: Any, path: str, check_name: Check, check_value: Check, max_pairs: int) -> dict[Any, Any]:
    """Accept an object whose members have any name that passes its check."""
    pairs = bounded(mapping, len, "a number of members", 0, max_pairs)(value, path).items()
    return {check_name(name, path): check_value(each, f"{path}.{name}") for name, each in pairs}


# --- what is not built --------------------------------------------------------------------------------------


@makes_checks
def refused(value: Any, path: str, why: str, *harmless: Any) -> Any:
    """Refuse an unsupported parameter, except with a value that changes nothing.

    Some client libraries always send the default.
    """
    if value not in harmless:
        raise unsupported(path, why)
    return value
