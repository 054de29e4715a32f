"""Cases that are data alone: tests/tables/<name>.toml, whose comments say what stands in a column."""

import tomllib
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parents[1] / "tables"


def table(name: str) -> dict[str, Any]:
    return tomllib.loads((TABLES / f"{name}.toml").read_text(encoding="utf-8"))
