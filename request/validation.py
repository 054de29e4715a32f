"""What a value of a request may be: checks, of which the tables of parameters are made.

    (value, its path) --Check--> the value as we use it, or BadInput

Authority: openai-openapi, for the limits of what is checked.

Not here: which parameters there are (params.py), what messages are (messages.py), how an error sounds
(refusals.py).
"""

from collections.abc import Callable, Mapping
from typing import Any

from request.refusals import unsupported, wrong_type, wrong_value

Check = Callable[[Any, str], Any]  # (value, its path) -> the value as we use it; raises BadInput


# --- checks -------------------------------------------------------------------------------------------------


def anything(value: Any, path: str) -> Any:
    """A hint, whatever it says: enums of hints grow monthly."""
    return value


def boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(path, "a boolean", value)
    return value


def number(low: float, high: float) -> Check:
    def check(value: Any, path: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(path, "a number", value)
        if not low <= value <= high:  # NaN too
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
    """As long as the body may be."""
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


def list_of(item: Check, max_items: int = 1024, min_items: int = 0) -> Check:
    def check(value: Any, path: str) -> list[Any]:
        if not isinstance(value, list):
            raise wrong_type(path, "an array", value)
        if not min_items <= len(value) <= max_items:
            raise wrong_value(path, f"{min_items} to {max_items} items", f"{len(value)} items")
        return [item(v, f"{path}[{i}]") for i, v in enumerate(value)]

    return check


def mapping(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(path, "an object", value)
    return value


def members(**rows: Check) -> Check:
    """An object; the members named are checked, others are let through, nulls are absent."""

    def check(value: Any, path: str) -> dict[str, Any]:
        present = {k: v for k, v in mapping(value, path).items() if v is not None}
        return {k: rows[k](v, f"{path}.{k}") if k in rows else v for k, v in present.items()}

    return check


def needed(fields: Mapping[str, Any], name: str, check: Check, path: str) -> Any:
    """The member of the object at `path`, which must have it."""
    return check(fields.get(name), f"{path}.{name}")


def refused(why: str, *harmless: Any) -> Check:
    """Only the values that ask for nothing are taken."""

    def check(value: Any, path: str) -> Any:
        if not any(type(value) is type(h) and value == h for h in harmless):  # 0 == False
            raise unsupported(path, why)
        return value

    return check
