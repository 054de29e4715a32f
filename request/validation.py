"""Checks: what a value in a request's JSON may be, as functions that are put together.

    (value, its path) --Check--> the value as we use it, or BadInput

    list_of(integer(0, 9))([1, 12], "stop_token_ids")
      --> Invalid value for 'stop_token_ids[1]': expected an integer from 0 to 9, got 12.

Authority: RFC 8259, section 3, for the types; openai-openapi for the limits that its callers state.

Rules of this file:
1. Types are JSON's and nothing is converted: true is no number, 1.0 is no integer, "5" is neither.
2. A check of a list or an object hands each part to that part's own check, with that part's own path: an
   error names the innermost value that is wrong.

Not here: which parameters there are (params.py), what messages are (messages.py), how an error is worded,
and that a null is missing rather than of a wrong type (refusals.py).
"""

from collections.abc import Callable, Mapping
from typing import Any

from request.refusals import unsupported, wrong_type, wrong_value

Check = Callable[[Any, str], Any]  # (value, its path) -> the value as we use it; raises BadInput


# --- scalars ------------------------------------------------------------------------------------------------


def anything(value: Any, path: str) -> Any:
    """Accept a hint, whatever its value: the enums of hints grow monthly."""
    return value


def boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(path, "a boolean", value)
    return value


def number(low: float, high: float) -> Check:
    def check(value: Any, path: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(path, "a number", value)
        if not low <= value <= high:  # NaN is in no range
            raise wrong_value(path, f"a number from {low:g} to {high:g}", value)
        return value

    return check


def integer(low: int, high: int) -> Check:
    def check(value: Any, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(path, "an integer", value)
        if not low <= value <= high:
            raise wrong_value(path, f"an integer from {low} to {high}", value)
        return value

    return check


def text(value: Any, path: str) -> str:
    """Accept a string of any length: only the size of the body limits it."""
    if not isinstance(value, str):
        raise wrong_type(path, "a string", value)
    return value


def string(max_length: int, min_length: int = 0) -> Check:
    def check(value: Any, path: str) -> str:
        characters = text(value, path)
        if not min_length <= len(characters) <= max_length:
            raise wrong_value(path, f"a string of {min_length} to {max_length} characters", value)
        return characters

    return check


def one_of(*allowed: str) -> Check:
    def check(value: Any, path: str) -> str:
        word = text(value, path)
        if word not in allowed:
            raise wrong_value(path, "one of " + ", ".join(map(repr, allowed)), value)
        return word

    return check


# --- lists and objects --------------------------------------------------------------------------------------


def list_of(check_item: Check, max_items: int = 1024, min_items: int = 0) -> Check:
    def check(value: Any, path: str) -> list[Any]:
        if not isinstance(value, list):
            raise wrong_type(path, "an array", value)
        if not min_items <= len(value) <= max_items:
            raise wrong_value(path, f"{min_items} to {max_items} items", f"{len(value)} items")
        return [check_item(item, f"{path}[{i}]") for i, item in enumerate(value)]

    return check


def mapping(value: Any, path: str) -> dict[str, Any]:
    """Accept an object, whatever its members."""
    if not isinstance(value, dict):
        raise wrong_type(path, "an object", value)
    return value


def members(**checks: Check) -> Check:
    """Accept an object; only the members named here are checked, and members that are null are dropped."""

    def check(value: Any, path: str) -> dict[str, Any]:
        checked = {}
        for name, member in mapping(value, path).items():
            if member is not None:
                check_member = checks.get(name, anything)
                checked[name] = check_member(member, f"{path}.{name}")
        return checked

    return check


def required(parent: Mapping[str, Any], name: str, check: Check, path: str) -> Any:
    """Return a checked member of the object at `path`, which must have it."""
    return check(parent.get(name), f"{path}.{name}")


# --- what is not built --------------------------------------------------------------------------------------


def refused(why: str, *harmless: Any) -> Check:
    """Accept only the values that ask for nothing, such as the default that a client library always sends."""

    def check(value: Any, path: str) -> Any:
        for allowed in harmless:
            if type(value) is type(allowed) and value == allowed:  # in Python, 0 == False
                return value
        raise unsupported(path, why)

    return check
