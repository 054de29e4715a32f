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

from collections.abc import Callable, Mapping
from typing import Any

from request.refusals import unsupported, wrong_type, wrong_value

Check = Callable[[Any, str], Any]  # (value, its path) -> the value as we use it; raises BadInput


# --- scalars ------------------------------------------------------------------------------------------------


def anything(value: Any, path: str) -> Any:
    """Accept a value that is checked elsewhere."""
    return value


def hint(value: Any, path: str) -> Any:
    """Accept any value, since the enums of hints grow monthly; a list or an object is emptied."""
    return type(value)() if isinstance(value, list | dict) else value


def boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(path, "a boolean", value)
    return value


def number(low: float, high: float, kind: str = "a number") -> Check:
    def check(value: Any, path: str) -> Any:
        is_number = isinstance(value, int if kind == "an integer" else int | float)
        if isinstance(value, bool) or not is_number:
            raise wrong_type(path, kind, value)
        if not low <= value <= high:  # NaN is in no range
            raise wrong_value(path, f"{kind} from {low} to {high}", value)
        return value

    return check


def integer(low: int, high: int) -> Check:
    return number(low, high, "an integer")


def text(value: Any, path: str) -> str:
    """Accept a string of any length: only the size of the body limits it."""
    if not isinstance(value, str):
        raise wrong_type(path, "a string", value)
    return value


def string(max_length: int, min_length: int = 0) -> Check:
    def check(value: Any, path: str) -> str:
        if not min_length <= len(text(value, path)) <= max_length:
            raise wrong_value(path, f"a string of {min_length} to {max_length} characters", value)
        return str(value)

    return check


def one_of(*allowed: str) -> Check:
    def check(value: Any, path: str) -> str:
        if text(value, path) not in allowed:
            raise wrong_value(path, "one of " + ", ".join(map(repr, allowed)), value)
        return str(value)

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
    """Accept an object; members that are null, or not named here, are dropped."""

    def check(value: Any, path: str) -> dict[str, Any]:
        given = mapping(value, path)
        checked = {}
        for name, check_member in checks.items():
            if given.get(name) is not None:
                checked[name] = check_member(given[name], f"{path}.{name}")
        return checked

    return check


def pairs_of(check_name: Check, check_value: Check, max_pairs: int) -> Check:
    """Accept an object whose members have any name that passes its check."""

    def check(value: Any, path: str) -> dict[Any, Any]:
        pairs = mapping(value, path)
        if len(pairs) > max_pairs:
            raise wrong_value(path, f"at most {max_pairs} pairs", f"{len(pairs)} pairs")
        return {check_name(name, path): check_value(pairs[name], f"{path}.{name}") for name in pairs}

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


# --- how much of it is held ---------------------------------------------------------------------------------

VALUE_BYTES = 64  # what Python takes for a value, even an empty one


def n_bytes(value: Any) -> int:
    """Return about how much memory a JSON value takes."""
    match value:
        case str():
            return VALUE_BYTES + len(value.encode())
        case list():
            return VALUE_BYTES + sum(map(n_bytes, value))
        case dict():
            return VALUE_BYTES + sum(len(name) + n_bytes(member) for name, member in value.items())
        case _:
            return VALUE_BYTES
