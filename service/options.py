"""The options of the command line: their names, defaults, checks and help.

    argv --arguments().parse_args()--> options --secrets(), upstream_keys()--> the settings of the server

Rules of this file:
1. We refuse a value that cannot work here, in a line with the expected value and the given one.
2. NaN, infinities and empty texts are refused: most often a variable of the shell is not set.
3. Settings that few operators need share one repeatable option of NAME=NUMBER pairs.
4. Every secret can come from a file or the environment: `ps` shows a command line to all users.
"""

import os
import re
import tomllib
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dialects.families import DIALECTS
from gateway.upstreams import DEFAULT_TIMEOUTS
from request.params import ALIAS
from responses import REASONING_EVENTS
from service import logs
from store import IN_MEMORY, Retention

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
MAX_DRAFTS = 16  # per sequence and step: a GPU verifies 16 in the time of one
MAX_NUMBER = 10**15  # SQLite, C and the event loop's clock can hold it


# --- checks -------------------------------------------------------------------------------------------------


def matching(pattern: str, expected: str, text: str) -> str:
    """Return a text of this form, without blanks around it."""
    text = text.strip()
    if not re.fullmatch(pattern, text, re.ASCII):
        raise ArgumentTypeError(f"expected {expected}, got {text or 'nothing'}")
    return text


def number(kind: Callable[[str], float], low: float, text: str, high: float = MAX_NUMBER) -> float:
    """Return a number from `low` to `high`: not NaN, nor an infinity."""
    try:
        value = kind(text)
        if low <= value <= high:
            return value
    except ValueError:
        pass
    raise ArgumentTypeError(
        f"expected {'an integer' if kind is int else 'a number'} from {low} to {high:g}, got {text}"
    )


def timeout(text: str) -> tuple[str, float]:
    """Return NAME=SECONDS as a field of Timeouts, such as first_byte_s, and its value."""
    name, _, value = text.partition("=")
    field = name.replace("-", "_") + "_s"
    if field not in DEFAULT_TIMEOUTS._fields:
        raise ArgumentTypeError(f"expected connect, first-byte, idle, answer or probe, =SECONDS; got {text}")
    return field, seconds(value)


UNITS = "BKMGT"  # powers of 1024; without a unit the index is 0, too


def size(text: str) -> int:
    """Return the number of bytes in a text such as 512M or 1.5G."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text, re.ASCII | re.IGNORECASE)
    n_bytes = float(match[1]) * 1024 ** UNITS.index(match[2].upper()) if match else 0
    if not 1 <= n_bytes <= MAX_NUMBER:
        raise ArgumentTypeError(f"expected bytes such as 512M or 2G, got {text}")
    return int(n_bytes)


natural = partial(number, int, 0)
positive = partial(number, int, 1)
seconds = partial(number, float, 0.001)
text = partial(matching, "(?s).+", "a text")
host_name = partial(matching, r"\*|[\w-]+(\.[\w-]+)*", "a name without port, such as example.org, or '*'")
origin = partial(matching, r"\*|[a-z][a-z0-9+.-]*://[^/?#@\s]+", "https://HOST, https://HOST:PORT or '*'")
PORT = r"(\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
base_url = partial(
    matching,
    rf"(?i)https?://([^@/?#\s]*@)?([^@:/?#\s]+|\[[^]\s]+\])(:{PORT})?(/[^?#\s]*)?",
    "http://HOST:PORT/v1 or the like",
)

# --- the options --------------------------------------------------------------------------------------------

# As --help shows them. In place of a check there may be the list of values. The default False makes a switch,
# and [] an option that may be repeated.
# fmt: off
OPTIONS: dict[str, list[Any]] = {
    #   name and value              check, default                    help
    "model": [
        ("--model DIR|FILE|ID",     text, None,
         "a Hugging Face model directory, a GGUF file, or an id on the Hub such as Qwen/Qwen3-0.6B; without "
         "it, SmolLM2-135M-Instruct is fetched once and served"),
        ("--revision REV",          text, None,
         "branch, tag or commit of a model on the Hub (default: main, which may change)"),
        ("--served-model-name NAME", text, [],
         f"name in requests (default: the directory's); '{ALIAS}' always works too; repeatable"),
        ("--dialect",               DIALECTS, None,
         "how the model marks reasoning and calls (default: from its chat template)"),
    ],
    "speed and memory": [
        ("--device",                ("auto", "cuda", "cpu"), "auto",
         "device that computes; auto: a GPU if available"),
        ("--check-kernels",         None, False,
         "check the kernels of the GPU again; else that is done once for each GPU, driver and model"),
        ("--weights",               ("bfloat16", "int8", "int4"), None,
         "round the weights to this, on a CPU with Numba; answers become worse (default: as in the file)"),
        ("--threads N",             positive, None, "threads that compute (default: all cores)"),
        ("--max-model-len N",       positive, None,
         "context in tokens, prompt and answer (default: the model's own)"),
        ("--kv-memory BYTES",       size, None,
         "memory for the KV cache, such as 2G (default: a quarter of what is free)"),
        ("--max-batch N",           positive, 16, "sequences that run at once"),
        ("--speculate N",           partial(number, int, 0, high=MAX_DRAFTS), 0,
         f"draft up to N tokens per step by prompt lookup, at most {MAX_DRAFTS}; 0 turns it off"),
    ],
    "network and keys": [
        ("--host HOST",             text, "127.0.0.1", "address to listen on; 0.0.0.0: all interfaces"),
        ("--port N",                partial(number, int, 0, high=65535), 8000,
         "port to listen on; 0: any free one"),
        ("--api-key KEY",           text, [],
         "require 'Authorization: Bearer KEY' except for / and /health; each key sees only its own "
         "responses; LLMREF_API_KEY in the environment is one more; repeatable"),
        ("--api-key-file FILE",     text, None,
         "a file with such keys, one a line: other users of this machine can read a command line"),
        ("--cors-origin URL",       origin, [],
         "let pages from there, such as https://example.org, call this server; '*': from anywhere; "
         "repeatable"),
        ("--allowed-host NAME",     host_name, [],
         "a name by which clients may call a server without keys, '*': any; else only its address, localhost "
         "and --host, because an attacker can make a name point here (DNS rebinding); repeatable"),
        ("--max-body BYTES",        size, "2M", "size of a request, also when unpacked"),
        ("--max-streams N",         positive, 1024,
         "requests that are open at once; a further one gets 503, or 429 if its own key, one of several, "
         "holds too many"),
        ("--reader-timeout SECONDS", seconds, 60.0,
         "seconds before a client that has stopped reading is dropped"),
        ("--shutdown-grace SECONDS", partial(number, float, 0), 5.0,
         "seconds that running requests get to finish at a stop"),
    ],
    "answers": [
        ("--max-output-tokens N",   positive, 4096,
         "tokens of an answer; a request may ask for fewer"),
        ("--images",                ("refuse", "placeholder"), "refuse",
         "images in requests: refuse them, or show the model a placeholder"),
        ("--reasoning-events",      REASONING_EVENTS, "openai",
         "names of reasoning events: reasoning_text.* or, for Open Responses' own tests, reasoning.*"),
        ("--no-done-line",          None, False, "end Responses streams without 'data: [DONE]'"),
    ],
    "store": [
        ("--store FILE",            text, IN_MEMORY,
         "SQLite file that keeps responses; in memory they are lost at exit"),
        ("--store-max-responses N", positive, Retention.max_responses,
         "keep at most N responses, the newest, for 30 days"),
        ("--store-max-bytes N",     positive, Retention.max_bytes, "keep at most N bytes of responses"),
        ("--no-temporary",          None, False,
         "refuse background with store=false, as OpenAI did at first, instead of keeping it for 10 minutes"),
        ("--secret TEXT",           text, [],
         "key that signs what clients keep for this server (reasoning, compactions), so that it cannot be "
         "forged; it stays readable; of several keys the first is used (default: LLMREF_SECRET in the "
         "environment, else another at each start)"),
        ("--secret-file FILE",      text, None, "a file that holds this key"),
    ],
    "upstream servers": [
        ("--upstream URL",          base_url, [],
         "an OpenAI-compatible server whose models are served too, such as http://host:8000/v1; without "
         "--model only those; repeatable"),
        ("--upstream-api-key KEY",  text, [], "sent to the one upstream as 'Authorization: Bearer KEY'"),
        ("--upstream-api-key-file FILE", text, None,
         "a file of such keys: the key, or for several upstreams a line 'URL KEY' for each; "
         "LLMREF_UPSTREAM_API_KEY in the environment may hold the same"),
        ("--upstream-timeout NAME=SECONDS", timeout, [],
         "seconds that an upstream gets: connect; first-byte, until the first text, reasoning or call; "
         "idle, between two chunks; answer, from then to the end; probe, the interval of the health probes, "
         "and the limit for one "
         f"(default: connect={DEFAULT_TIMEOUTS.connect_s:g}, first-byte={DEFAULT_TIMEOUTS.first_byte_s:g}, "
         f"idle={DEFAULT_TIMEOUTS.idle_s:g}, answer={DEFAULT_TIMEOUTS.answer_s:g}, "
         f"probe={DEFAULT_TIMEOUTS.probe_s:g}); repeatable"),
        ("--price NUMBER",          natural, None,
         "the price of one token, an integer: adds costs to the usage of upstreams"),
    ],
    "looking inside": [
        ("--debug-steps",           None, False,
         "stream what each step of the engine does at /debug/steps, and show it on the page, to each key "
         "its own"),
        ("--log-level",             ("debug", "info", "warning", "error"), "info",
         "how much to log, on stderr"),
        ("--log-format",            logs.FORMATS, "text", "how a line of the log is written"),
    ],
}
# fmt: on


def arguments() -> ArgumentParser:
    parser = ArgumentParser(
        usage="%(prog)s [OPTION ...]",
        description="Serve a language model over OpenAI's and Anthropic's APIs (docs/operating.md).",
    )
    for title, options in OPTIONS.items():
        section = parser.add_argument_group(title)
        for usage, check, default, about in options:
            name, _, value = usage.partition(" ")
            settings: dict[str, Any] = {"type": check, "metavar": value}
            if default is False:
                settings = {"action": "store_true"}
            elif not callable(check):
                settings = {"choices": check}
            elif default == []:
                settings["action"] = "append"
            if default:
                about += f" (default: {default})"
            section.add_argument(name, help=about, default=default, **settings)
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    parser.add_argument("--version", action="version", version=f"{project['name']} {project['version']}")
    return parser


# --- secrets -------------------------------------------------------------------------------


def secrets(args: Namespace, name: str) -> list[str]:
    """Return the keys that an option, its file and its variable hold, one a line.

    Lines whose first character is "#" are comments, indented too. Raises OSError, or ValueError for a text
    without a key or with one that is not ASCII; the message does not show it.
    """
    option, variable = f"--{name.replace('_', '-')}", f"LLMREF_{name.upper()}"
    sources = [(option, text) for text in getattr(args, name)]
    if file := getattr(args, f"{name}_file"):
        try:
            sources.append((f"{option}-file", Path(file).read_text(encoding="latin-1")))  # of any bytes
        except OSError as error:
            raise OSError(f"{option}-file: {error}") from error
    if variable in os.environ:
        sources.append((variable, os.environ[variable]))
    found: list[str] = []
    for source, text in sources:
        # Not splitlines(), for which the second byte of an "Å" in UTF-8 ends a line too.
        lines = [line.strip() for line in text.split("\n")]
        keys = [line for line in lines if line[:1] not in ("", "#")]
        if not re.fullmatch("[ -~]+", "".join(keys)):
            raise ValueError(f"{source}: expected a key of printable ASCII, for it travels in a header")
        found += keys
    return found


def upstream_keys(args: Namespace) -> dict[str, str]:
    """Return the key of each upstream that has one, by its URL; raises ValueError.

    A key is for one server: with several upstreams each key has the URL that it is sent to.
    """
    keys: dict[str, str] = {}
    for line in secrets(args, "upstream_api_key"):
        *urls, secret = line.split()
        url, *others = urls or args.upstream
        if others or url not in args.upstream:
            raise ValueError(
                "--upstream-api-key: expected a line 'URL KEY' for each upstream, with the URL as --upstream "
                "has it; got another line, which may hold a key"
            )
        keys[url] = secret
    return keys
