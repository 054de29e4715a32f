"""Checks: what a value in a request's JSON may be, as functions that are put together.

    (value, its path) --Check--> the value as we use it, or BadInput

    list_of(integer(0, 9))([1, 12], "stop_token_ids")
      --> Invalid value for 'stop_token_ids[1]': expected a number from 0 to 9, got 12.

Authority: RFC 8259, section 3, for the types; openai-openapi for the limits that the callers state.

Rules of this file:
1. Types are JSON's and nothing is converted: true is not a number, 1.0 is not an integer, "5" is neither.
2. A check of a list or an object hands each part to the part's own check, with the part's own path: an error
   names the innermost value that is wrong.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from request.refusals import unsupported, wrong_type, wrong_value

Object = dict[str, Any]  # one of JSON
Check = Callable[[Any, str], Any]  # (value, its path) -> the value as we use it; raises BadInput


# --- scalars ------------------------------------------------------------------------------------------------


def anything(value: Any, path: str) -> Any:
    """Accept a value that is checked elsewhere."""
    return value


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
mapping = of_type("an object", dict)


def number(low: float, high: float, check_type: Check = real) -> Check:
    def check(value: Any, path: str) -> Any:
        if not low <= check_type(value, path) <= high:  # NaN is in no range
            raise wrong_value(path, f"a number from {low} to {high}", value)
        return value

    return check


integer = partial(number, check_type=whole)


def string(max_length: int, min_length: int = 0) -> Check:
    def check(value: Any, path: str) -> Any:
        if not min_length <= len(text(value, path)) <= max_length:
            raise wrong_value(path, f"a string of {min_length} to {max_length} characters", value)
        return value

    return check


def one_of(*allowed: str) -> Check:
    def check(value: Any, path: str) -> Any:
        if text(value, path) not in allowed:
            raise wrong_value(path, "one of " + ", ".join(map(repr, allowed)), value)
        return value

    return check


# --- lists and objects --------------------------------------------------------------------------------------


def list_of(check_item: Check, max_items: int = 1024, min_items: int = 0) -> Check:
    def check(value: Any, path: str) -> list[Any]:
        if not min_items <= len(array(value, path)) <= max_items:
            raise wrong_value(path, f"{min_items} to {max_items} items", f"{len(value)} items")
        return [check_item(item, f"{path}[{i}]") for i, item in enumerate(value)]

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

    def check(value: Any, path: str) -> dict[Any, Any]:
        pairs = mapping(value, path)
        if len(pairs) > max_pairs:
            raise wrong_value(path, f"at most {max_pairs} pairs", f"{len(pairs)} pairs")
        return {check_name(name, path): check_value(pairs[name], f"{path}.{name}") for name in pairs}

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
    """Accept an object, whatever its members."""
    return Place(mapping(value, path), path)


# --- what is not built --------------------------------------------------------------------------------------


def refused(why: str, *harmless: Any) -> Check:
    """Accept only the values that ask for nothing, such as the default that a client library always sends."""

    def check(value: Any, path: str) -> Any:
        for allowed in harmless:
            if type(value) is type(allowed) and value == allowed:  # in Python, 0 == False
                return value
        raise unsupported(path, why)

    return check
