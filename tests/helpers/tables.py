"""Cases that are data alone: tests/tables/<name>.toml, whose comments say what stands in a column."""

import tomllib
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parents[1] / "tables"


def table(name: str) -> dict[str, Any]:
    return tomllib.loads((TABLES / f"{name}.toml").read_text(encoding="utf-8"))


def plain(value: Any) -> Any:
    """Return a value as TOML says it: of a tuple with names what is not as always, and None as ""."""
    if hasattr(value, "_asdict"):
        always = value._field_defaults
        return {name: plain(it) for name, it in value._asdict().items() if it != always.get(name, object)}
    if isinstance(value, dict):
        return {name: plain(it) for name, it in value.items()}
    if isinstance(value, list | tuple):
        return [*map(plain, value)]
    return "" if value is None else value
