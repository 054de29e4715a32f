"""Checks: what a value in a request's JSON may be, as functions that are put together.

    (value, its path) --Check--> the value as we use it, or BadInput
    (value, Shape) --shaped()--> the members that are known, and no others

    list_of(integer(0, 9))([1, 12], "stop_token_ids")
      --> Invalid value for 'stop_token_ids[1]': expected an integer from 0 to 9, got 12.

Authority: RFC 8259, section 3, for the types; openai-openapi for the limits that its callers state.

Rules of this file:
1. Types are JSON's and nothing is converted: true is no number, 1.0 is no integer, "5" is neither.
2. A check of a list or an object hands each part to that part's own check, with that part's own path: an
   error names the innermost value that is wrong.
3. What no table knows is dropped, at every level: a request may wait, or be stored, and is held meanwhile.

Not here: which parameters there are (params.py), what messages are (messages.py), how an error is worded,
and that a null is missing rather than of a wrong type (refusals.py).
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
    """Accept any value, for the enums of hints grow monthly; of a list or an object nothing is kept."""
    return shaped(value, SCALAR)


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
    """Accept an object; members that are null, or not named here, are dropped."""

    def check(value: Any, path: str) -> dict[str, Any]:
        given = mapping(value, path)
        checked = {}
        for name, check_member in checks.items():
            if given.get(name) is not None:
                checked[name] = check_member(given[name], f"{path}.{name}")
        return checked

    return check


def required(parent: Mapping[str, Any], name: str, check: Check, path: str) -> Any:
    """Return a checked member of the object at `path`, which must have it."""
    return check(parent.get(name), f"{path}.{name}")


# --- how much of it is held ---------------------------------------------------------------------------------

SCALAR = "scalar"  # a string, a number, true, false or null
ANY = "any"  # JSON whose members are the client's own, such as a schema
Shape = str | list["Shape"] | dict[str, "Shape"]  # SCALAR, ANY, a list of one shape, an object by its members

VALUE_BYTES = 64  # what Python takes for a value, be it empty


def shaped(value: Any, shape: Shape) -> Any:
    """Return a value without the members that its shape does not know.

    A scalar may stand anywhere. A list or an object where none belongs is left empty, for a check to refuse.
    """
    if shape == ANY or not isinstance(value, dict | list):
        return value
    if isinstance(value, dict) and isinstance(shape, dict):
        return {name: shaped(value[name], shape[name]) for name in value if name in shape}
    if isinstance(value, list) and isinstance(shape, list):
        return [shaped(element, shape[0]) for element in value]
    return type(value)()


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


def at_most(max_bytes: int, check: Check) -> Check:
    """Accept what another check accepts, as far as n_bytes() of it is not above the limit."""

    def check_size(value: Any, path: str) -> Any:
        size = n_bytes(value)
        if size > max_bytes:
            raise wrong_value(
                path, f"at most {max_bytes} bytes ({VALUE_BYTES} for each value)", f"{size} bytes"
            )
        return check(value, path)

    return check_size


# --- what is not built --------------------------------------------------------------------------------------


def refused(why: str, *harmless: Any) -> Check:
    """Accept only the values that ask for nothing, such as the default that a client library always sends."""

    def check(value: Any, path: str) -> Any:
        for allowed in harmless:
            if type(value) is type(allowed) and value == allowed:  # in Python, 0 == False
                return value
        raise unsupported(path, why)

    return check
