"""The options of the command line: their names, defaults, checks and help.

    argv --arguments().parse_args()--> options --timeouts(), prices(), read_keys()--> what the server is given

Rules of this file:
1. A value that cannot work is refused here, in one line that says what was expected and what came.
2. NaN, infinities and empty texts are refused: most often a variable of the shell is not set.
3. What only few operators set is one repeatable option of NAME=NUMBER pairs, not an option for each name.
4. Every secret can come from a file or the environment: `ps` shows a command line to all users.
"""

import argparse
import os
import re
import tomllib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from dialects.families import DIALECTS
from gateway.metering import Prices, TokenCounts
from gateway.upstreams import Timeouts
from responses import REASONING_EVENTS
from service import logs
from store import Retention
from worker import ALIAS, MAX_OUTPUT_TOKENS

T = TypeVar("T", int, float)

IN_MEMORY = ":memory:"
KEY_VARIABLE = "LLMREF_API_KEY"
SECRET_VARIABLE = "LLMREF_SECRET"
UPSTREAM_KEY_VARIABLE = "LLMREF_UPSTREAM_API_KEY"
DEVICES = ("auto", "cuda", "cpu")  # auto: cuda where there is a GPU, else cpu
LEVELS = ("debug", "info", "warning", "error")
MAX_DRAFTS = 16  # a sequence and step: a GPU verifies so many at the price of one
MAX_NUMBER = 10**15  # of any kind: SQLite, C and the event loop's clock can hold it

# --- checks -------------------------------------------------------------------------------------------------

SUFFIXES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size(text: str) -> int:
    """Bytes, with a suffix: 512M, 1.5G"""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text, re.ASCII | re.IGNORECASE)
    n_bytes = 0.0
    if match:
        number, suffix = match.groups()
        n_bytes = float(number) * SUFFIXES[suffix.upper()]
    if not 1 <= n_bytes <= MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"expected bytes such as 512M or 2G, got {text}")
    return int(n_bytes)


def at_least(low: float, kind: Callable[[str], T]) -> Callable[[str], T]:
    """A number from `low` to MAX_NUMBER; NaN and the infinities are none."""

    def number(text: str) -> T:
        try:
            value = kind(text)
            if low <= float(value) <= MAX_NUMBER:
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected {low} or more, at most {MAX_NUMBER:.0e}, got {text}")

    return number


def named(names: Collection[str], number: Callable[[str], T]) -> Callable[[str], tuple[str, T]]:
    """NAME=NUMBER, one of the names and a number for it."""

    def pair(text: str) -> tuple[str, T]:
        name, _, value = text.partition("=")
        if name not in names:
            raise argparse.ArgumentTypeError(
                f"expected NAME=NUMBER with NAME one of {', '.join(names)}; got {text}"
            )
        try:
            return name, number(value)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{name}: {error}") from error

    return pair


def text(value: str, expected: str = "a text") -> str:
    """Anything but an empty text."""
    if not value.strip():
        raise argparse.ArgumentTypeError(f"expected {expected}, got nothing")
    return value.strip()


def key(value: str) -> str:
    key = text(value, "a key")
    if not (key.isascii() and key.isprintable()):
        raise argparse.ArgumentTypeError("expected a key of printable ASCII, for it travels in a header")
    return key


def origin(text: str) -> str:
    if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/?#@\s]+", text):
        raise argparse.ArgumentTypeError(f"expected https://HOST, https://HOST:PORT or '*', got {text}")
    return text


def base_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises ValueError for a port that is none
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT/v1 or the like, got {text}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT/v1 or the like, got {text}")
    return text


def host_name(text: str) -> str:
    if not re.fullmatch(r"\*|[\w-]+(\.[\w-]+)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"expected a name without port, such as example.org, or '*', got {text}"
        )
    return text.lower()


natural = at_least(0, int)
positive = at_least(1, int)
seconds = at_least(0.001, float)

# fmt: off
#  --upstream-timeout   field of Timeouts
TIMEOUTS = {
    "connect":          "connect_s",
    "first-byte":       "first_byte_s",
    "idle":             "idle_s",
    "answer":           "answer_s",
    "probe":            "probe_s",
}
# fmt: on
PRICES = ("token", *TokenCounts._fields, "coefficient")

timeout = named(TIMEOUTS, seconds)
price = named(PRICES, natural)

# --- the options --------------------------------------------------------------------------------------------

WEIGHT_FORMATS = ("bfloat16", "int8", "int4")
DEFAULT_TIMEOUTS = ", ".join(f"{name}={getattr(Timeouts(), field):g}" for name, field in TIMEOUTS.items())
DEFAULT_PRICES = Prices()


class Section:
    """A part of --help, with its options."""

    def __init__(self, parser: argparse.ArgumentParser, title: str) -> None:
        self._group = parser.add_argument_group(title)

    def add(self, name: str, about: str, default: Any = None, **settings: Any) -> None:
        if default:
            about += f" (default: {default})"
        self._group.add_argument(f"--{name}", help=about, default=default, **settings)

    def switch(self, name: str, about: str) -> None:
        self.add(name, about, default=False, action="store_true")

    def repeat(self, name: str, about: str, kind: Callable[[str], Any], metavar: str) -> None:
        self.add(name, f"{about}; repeatable", type=kind, metavar=metavar, action="append")


def model_options(section: Section) -> None:
    section.add(
        "model",
        "a Hugging Face model directory, a GGUF file, or an id on the Hub such as Qwen/Qwen3-0.6B; without "
        "it, SmolLM2-135M-Instruct is fetched once and served",
        type=text,
        metavar="DIR|FILE|ID",
    )
    section.add(
        "revision",
        "branch, tag or commit of a model on the Hub (default: main, which may change)",
        type=text,
        metavar="REV",
    )
    section.repeat(
        "served-model-name",
        f"name in requests (default: the directory's); '{ALIAS}' always works too",
        text,
        "NAME",
    )
    section.add(
        "dialect",
        "how the model marks reasoning and calls (default: as its chat template says)",
        choices=tuple(DIALECTS),
    )


def speed_options(section: Section) -> None:
    section.add("device", "where to compute; auto: on a GPU if there is one", "auto", choices=DEVICES)
    section.add(
        "weights",
        "round the weights to this, on a CPU with Numba; the start says what that loses "
        "(default: as in the file)",
        choices=WEIGHT_FORMATS,
    )
    section.add("threads", "threads that compute (default: all cores)", type=positive, metavar="N")
    section.add(
        "max-model-len",
        "context in tokens, prompt and answer (default: the model's own)",
        type=positive,
        metavar="N",
    )
    section.add(
        "kv-memory",
        "memory for the KV cache, such as 2G (default: a quarter of what is free)",
        type=size,
        metavar="BYTES",
    )
    section.add("max-batch", "sequences that run at once", 16, type=positive, metavar="N")
    section.add(
        "speculate",
        f"draft up to N tokens per step by prompt lookup, at most {MAX_DRAFTS}; 0 turns it off",
        0,
        type=natural,
        choices=range(MAX_DRAFTS + 1),
        metavar="N",
    )


def network_options(section: Section) -> None:
    section.add(
        "host", "address to listen on; 0.0.0.0: all interfaces", "127.0.0.1", type=text, metavar="HOST"
    )
    section.add("port", "port to listen on; 0: any free one", 8000, type=natural, metavar="N")
    section.repeat(
        "api-key",
        "require 'Authorization: Bearer KEY' except for / and /health; each key sees only its own responses; "
        f"{KEY_VARIABLE} in the environment is one more",
        key,
        "KEY",
    )
    section.add(
        "api-key-file",
        "a file with such keys, one a line: other users of this machine can read a command line",
        type=Path,
        metavar="FILE",
    )
    section.repeat(
        "cors-origin",
        "let pages from there, such as https://example.org, call this server; '*': from anywhere",
        origin,
        "URL",
    )
    section.repeat(
        "allowed-host",
        "a name by which clients may call a server without keys, '*': any; else only its address, localhost "
        "and --host, for any page's name can be made to point here (DNS rebinding)",
        host_name,
        "NAME",
    )
    section.add("max-body", "size of a request, also when unpacked", "2M", type=size, metavar="BYTES")
    section.add(
        "max-streams",
        "requests that are open at once; one more is refused: with 503, or with 429 if one of several keys "
        "would hold more than what is left",
        1024,
        type=positive,
        metavar="N",
    )
    section.add(
        "reader-timeout",
        "seconds before a client that has stopped reading is dropped",
        60.0,
        type=seconds,
        metavar="SECONDS",
    )
    section.add(
        "websocket-max-age",
        "seconds after which a WebSocket takes no more turns, and is closed",
        3600.0,
        type=seconds,
        metavar="SECONDS",
    )
    section.add(
        "shutdown-grace",
        "seconds that running requests get to finish at a stop",
        5.0,
        type=at_least(0, float),
        metavar="SECONDS",
    )


def answer_options(section: Section) -> None:
    section.add(
        "max-output-tokens",
        "tokens of an answer; a request may ask for fewer",
        MAX_OUTPUT_TOKENS,
        type=positive,
        metavar="N",
    )
    section.add(
        "images",
        "pictures in requests: refused, or the model is told that there was one",
        "refuse",
        choices=("refuse", "placeholder"),
    )
    section.add(
        "reasoning-events",
        "names of reasoning events: reasoning_text.* or, for Open Responses' own tests, reasoning.*",
        "openai",
        choices=tuple(REASONING_EVENTS),
    )
    section.switch("no-done-line", "end Responses streams without 'data: [DONE]'")


def store_options(section: Section) -> None:
    section.add(
        "store",
        "SQLite file that keeps responses; in memory they are lost at exit",
        IN_MEMORY,
        type=text,
        metavar="FILE",
    )
    section.add(
        "store-max-responses", "keep the newest N", Retention.max_responses, type=positive, metavar="N"
    )
    section.add("store-max-bytes", "and N bytes of them", Retention.max_bytes, type=positive, metavar="N")
    section.add("store-max-age", "each for N seconds", Retention.max_age_s, type=seconds, metavar="N")
    section.switch(
        "no-temporary",
        "refuse background with store=false, as OpenAI did at first, instead of keeping it for 10 minutes",
    )
    section.add(
        "secret",
        "key of what clients keep for this server: reasoning, compactions "
        f"(default: {SECRET_VARIABLE} in the environment, else another at each start)",
        type=text,
        metavar="TEXT",
    )
    section.add("secret-file", "a file that holds this key", type=Path, metavar="FILE")


def upstream_options(section: Section) -> None:
    section.repeat(
        "upstream",
        "an OpenAI-compatible server whose models are served too, such as http://host:8000/v1; without "
        "--model only those",
        base_url,
        "URL",
    )
    section.add(
        "upstream-api-key",
        "sent to the one upstream as 'Authorization: Bearer KEY'",
        type=key,
        metavar="KEY",
    )
    section.add(
        "upstream-api-key-file",
        "a file of such keys: the key, or for several upstreams a line 'URL KEY' for each; "
        f"{UPSTREAM_KEY_VARIABLE} in the environment may hold the same",
        type=Path,
        metavar="FILE",
    )
    section.repeat(
        "upstream-timeout",
        "seconds that an upstream gets: connect; first-byte, until its answer begins; idle, between two "
        "chunks of it; answer, for all of it; probe, between two looks at its models, and for one "
        f"(default: {DEFAULT_TIMEOUTS})",
        timeout,
        "NAME=SECONDS",
    )
    section.repeat(
        "price",
        "give the usage of upstreams its cost, in integers: token, the price of one; prompt, cached, "
        "completion and reasoning, the weights of these tokens in ten-thousandths "
        f"(default: {DEFAULT_PRICES.multipliers.prompt}); coefficient, the weight of all in thousandths "
        f"(default: {DEFAULT_PRICES.coefficient})",
        price,
        "NAME=NUMBER",
    )


def log_options(section: Section) -> None:
    section.switch(
        "debug-steps",
        "stream what each step of the engine does at /debug/steps, and show it on the page, to each key "
        "its own",
    )
    section.add("log-level", "how much to log, on stderr", "info", choices=LEVELS)
    section.add("log-format", "how a line of the log is written", "text", choices=tuple(logs.FORMATS))


# fmt: off
SECTIONS = {
    "model": model_options,
    "speed and memory": speed_options,
    "network and keys": network_options,
    "answers": answer_options,
    "store": store_options,
    "other servers behind this one": upstream_options,
    "looking inside": log_options,
}
# fmt: on


def arguments() -> argparse.ArgumentParser:
    about = "Serve a language model over OpenAI's Responses and Chat Completions APIs."
    parser = argparse.ArgumentParser(description=about, usage="python server.py [OPTION ...]")
    parser.add_argument("--version", action="version", version=version())
    for title, add_options in SECTIONS.items():
        add_options(Section(parser, title))
    return parser


def version() -> str:
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    return f"{project['name']} {project['version']}"


# --- options in several parts -------------------------------------------------------------------------------


def timeouts(args: argparse.Namespace) -> Timeouts:
    fields = {TIMEOUTS[name]: value for name, value in args.upstream_timeout or ()}
    return Timeouts(**fields)


def prices(args: argparse.Namespace) -> Prices | None:
    """What the tokens of upstreams cost; None: their usage gets no cost. Raises ValueError."""
    values = dict[str, int](args.price or ())
    if not values:
        return None
    if "token" not in values:
        raise ValueError(f"--price: expected token=NUMBER, the price of a token, beside {', '.join(values)}")
    per_token = values.pop("token")
    coefficient = values.pop("coefficient", DEFAULT_PRICES.coefficient)
    multipliers = DEFAULT_PRICES.multipliers._replace(**values)
    return Prices(per_token, multipliers, coefficient)


def secrets(text: str | None, file: Path | None, option: str, variable: str) -> list[tuple[str, str]]:
    """Return where a secret comes from, and its text: the option, each line of its file, the environment's.

    Lines that begin with "#" are comments. Raises ValueError for a file that cannot be read or is empty, and
    for a variable that is.
    """
    found: list[tuple[str, str]] = []
    if text:
        found.append((f"--{option}", text))
    if file:
        source = f"--{option}-file {file}"
        try:
            # Bytes that are not UTF-8 are not a key either, and are refused as one.
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            raise ValueError(f"{source}: {error.strerror}") from error
        said = [line for line in lines if line.strip() and not line.startswith("#")]
        found += [(source, line) for line in said or [""]]
    if variable in os.environ:
        found += [(variable, line) for line in os.environ[variable].splitlines() or [""]]
    checked: list[tuple[str, str]] = []
    for source, line in found:
        try:
            checked.append((source, key(line)))
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{source}: {error}") from error
    return checked


def read_keys(args: argparse.Namespace) -> list[str]:
    """Return the keys of the command line, the file and the environment; raises ValueError."""
    more = secrets(None, args.api_key_file, "api-key", KEY_VARIABLE)
    return list[str](args.api_key or ()) + [secret for _, secret in more]


def read_secret(args: argparse.Namespace) -> str | None:
    """Return the text of --secret, its file or the environment; raises ValueError."""
    found = secrets(args.secret, args.secret_file, "secret", SECRET_VARIABLE)
    return found[0][1] if found else None


def upstream_keys(args: argparse.Namespace) -> dict[str, str]:
    """Return the key of each upstream that has one, by its URL; raises ValueError.

    A key is for one server: with several upstreams each key has the URL that it is sent to.
    """
    upstreams: list[str] = args.upstream or []
    keys: dict[str, str] = {}
    option = "upstream-api-key"
    for source, line in secrets(
        args.upstream_api_key, args.upstream_api_key_file, option, UPSTREAM_KEY_VARIABLE
    ):
        url, _, secret = line.rpartition(" ")
        if not url and len(upstreams) == 1:
            url = upstreams[0]
        if url.strip() not in upstreams:
            expected = "a line 'URL KEY' for each upstream, with the URL as --upstream has it"
            raise ValueError(f"{source}: expected {expected}; got a key for {url!r}")
        keys[url.strip()] = secret
    return keys
