"""Checks: what a value in a request's JSON may be, as functions that are put together.

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

from request.refusals import unsupported, wrong_type, wrong_value

Object = dict[str, Any]  # one of JSON
Check = Callable[[Any, str], Any]  # (value, its path) -> the value as we use it; raises BadInput


# --- scalars ------------------------------------------------------------------------------------------------


def hint(value: Any, path: str) -> Any:
    """Accept any value, since the enums of hints grow monthly; only that it came is kept."""
    return ""


def of_type(expected: str, *types: type) -> Check:
    """Accept any value of these types: only the size of the body limits it."""

    def check(value: Any, path: str) -> Any:
        if type(value) not in types:  # to isinstance(), true is an integer
            raise wrong_type(path, expected, value)
        return value

    return check


boolean = of_type("a boolean", bool)
whole = of_type("an integer", int)
real = of_type("a number", int, float)
text = of_type("a string", str)
array = of_type("an array", list)
text_or_array = of_type("a string or an array", str, list)
text_or_object = of_type("a string or an object", str, dict)
mapping = of_type("an object", dict)


def bounded(check_type: Check, size: Callable[[Any], float], expected: str, low: float, high: float) -> Check:
    """Accept a value whose size lies within these limits."""

    def check(value: Any, path: str) -> Any:
        if not low <= size(check_type(value, path)) <= high:  # NaN is in no range
            raise wrong_value(path, f"{expected} from {low} to {high}", value)
        return value

    return check


number = partial(bounded, real, pos, "a number")
integer = partial(bounded, whole, pos, "an integer")
string = partial(bounded, text, len, "a string with a length")


def one_of(*allowed: str) -> Check:
    def check(value: Any, path: str) -> Any:
        if text(value, path) not in allowed:
            raise wrong_value(path, "one of " + ", ".join(map(repr, allowed)), value)
        return value

    return check


# --- lists and objects --------------------------------------------------------------------------------------


def list_of(check_item: Check, max_items: int = 1024) -> Check:
    check_size = bounded(array, len, "a number of items", 0, max_items)

    def check(value: Any, path: str) -> list[Any]:
        return [check_item(item, f"{path}[{i}]") for i, item in enumerate(check_size(value, path))]

    return check


def members(**checks: Check) -> Check:
    """Accept an object; members that are null, or not named here, are dropped."""

    def check(value: Any, path: str) -> Object:
        given = mapping(value, path)
        present = [name for name in checks if given.get(name) is not None]
        return {name: checks[name](given[name], f"{path}.{name}") for name in present}

    return check


def pairs_of(check_name: Check, check_value: Check, max_pairs: int) -> Check:
    """Accept an object whose members have any name that passes its check."""
    check_size = bounded(mapping, len, "a number of members", 0, max_pairs)

    def check(value: Any, path: str) -> dict[Any, Any]:
        pairs = check_size(value, path).items()
        return {check_name(name, path): check_value(each, f"{path}.{name}") for name, each in pairs}

    return check


class Place(NamedTuple):
    """An object in a request, and its path."""

    members: Object
    path: str

    def need(self, name: str, check: Check) -> Any:
        """Return a checked member, which the object must have."""
        return check(self.members.get(name), f"{self.path}.{name}")

    def get(self, name: str, check: Check, default: Any) -> Any:
        """Return a checked member, the default if it is null or empty."""
        return self.need(name, check) if self.members.get(name) else default


def place(value: Any, path: str) -> Place:
    """Accept an object with any members."""
    return Place(mapping(value, path), path)


# --- what is not built --------------------------------------------------------------------------------------


def refused(why: str, *harmless: Any) -> Check:
    """Accept only the values that ask for nothing, such as the default that a client library always sends."""

    def check(value: Any, path: str) -> Any:
        if value not in harmless:
            raise unsupported(path, why)
        return value

    return check
