"""The options of the command line: what each refuses, where secrets come from, what --help says."""

import re
from argparse import Namespace
from pathlib import Path

import pytest

from gateway.upstreams import Timeouts
from service import options

PARSER = options.arguments()
TYPES = {action.option_strings[0]: action.type for action in PARSER._actions if action.type}
TEXTS = {"--model", "--revision", "--served-model-name", "--host", "--store", "--cors-origin",
         "--allowed-host", "--upstream", "--api-key", "--secret", "--upstream-api-key", "--api-key-file",
         "--secret-file", "--upstream-api-key-file"}  # fmt: skip
NUMBERS = TYPES.keys() - TEXTS

WRONG = [
    *((name, value) for name in sorted(TYPES) for value in ("", " ")),
    *((name, value) for name in sorted(NUMBERS)
      for value in ("nan", "inf", "-inf", "1e999", "-5", "9" * 5000, "x")),
    *(("--cors-origin", value) for value in ("nonsense", "https://x/", "https://x/y", "x.org", "https://")),
    *(("--upstream", value) for value in ("nonsense", "ftp://x", "http://", "http://:80", "http://x:y",
                                          "http://x?y", "http://x:65536", "http://x:123456", "http://[::1")),
    *(("--allowed-host", value) for value in ("x.org:80", "http://x.org", "*.x.org", "x..org")),
    ("--speculate", "17"), ("--port", "65536"), ("--upstream-timeout", "idle=0"),
]  # fmt: skip
SIZES = {"1": 1, "64K": 2**16, "3m": 3 * 2**20, "1.5G": 3 * 2**29, "2GiB": 2**31, "2GB": 2**31}


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}={value[:9]!r}" for name, value in WRONG])
def test_what_cannot_work_is_refused(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bugs: an empty key let everybody in, an empty host was every address, a grace of inf a traceback."""
    with pytest.raises(SystemExit) as caught:
        PARSER.parse_args([f"{name}={value}"])
    assert caught.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"error: argument {name}: " in line
    assert "expected " in line
    assert "invalid " not in line  # argparse's word for a type that does not explain itself


def test_values_are_read() -> None:
    assert {text: options.size(text) for text in SIZES} == SIZES
    for url in ("http://x", "HTTPS://x.org:8000/v1/", "http://[::1]:80/v1", "http://u:p@x/v1"):
        assert PARSER.parse_args(["--upstream", url]).upstream == [url]
    found = PARSER.parse_args(["--upstream-timeout", "connect=1", "--upstream-timeout", "first-byte=2.5"])
    assert Timeouts(**dict(found.upstream_timeout)) == Timeouts(connect_s=1, first_byte_s=2.5)


def test_help() -> None:
    said = PARSER.format_help()
    explained = re.findall(r"^  (?:-h, )?(--[a-z-]+)(?: \S+)?(?: {2,}|\n {10,})[a-zA-Z]", said, re.MULTILINE)
    assert {*explained} == {action.option_strings[-1] for action in PARSER._actions}
    assert "(default: None)" not in said


# --- secrets ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_KEY", "SECRET", "UPSTREAM_API_KEY"):
        monkeypatch.delenv(f"LLMREF_{name}", raising=False)


def parsed(*flags: object) -> Namespace:
    return PARSER.parse_args([str(flag) for flag in flags])


def test_a_secret_comes_from_options_a_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs: the text of a comment in a file of keys was a key that opened the server; so was what follows an
    "\u00c5" in it, whose second byte ends a line for splitlines(), and a comment that is indented.
    """
    (tmp_path / "keys").write_text("# of Ada\n two \n\n \t# of \u00c5sa\n", "utf-8")
    monkeypatch.setenv("LLMREF_API_KEY", "three\n")
    args = parsed("--api-key", " one ", "--api-key-file", tmp_path / "keys")
    assert options.secrets(args, "api_key") == ["one", "two", "three"]
    assert options.secrets(args, "secret") == []


# An emptied file would open the server.
@pytest.mark.parametrize("content", ["\n# of Ada\n", "cl\u00e9"])
def test_what_holds_no_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    """An option, a file, a variable; with another key beside it too."""
    (tmp_path / "keys").write_text(content, "utf-8")
    for flags in (["--api-key", content], ["--api-key-file", tmp_path / "keys"]):
        with pytest.raises(ValueError, match=f"{flags[0]}: expected a key of printable ASCII"):
            options.secrets(parsed("--api-key", "one", *flags), "api_key")
    with pytest.raises(OSError, match="--api-key-file: "):
        options.secrets(parsed("--api-key-file", tmp_path / "no-file"), "api_key")
    for text in ("", content):
        monkeypatch.setenv("LLMREF_API_KEY", text)
        with pytest.raises(ValueError, match="LLMREF_API_KEY: expected a key"):
            options.secrets(parsed(), "api_key")


def test_a_key_goes_to_one_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: one key was sent to all upstreams, whoever ran them."""
    a, b = "http://a/v1", "http://b/v1"
    assert options.upstream_keys(parsed("--upstream", a, "--upstream-api-key", "k")) == {a: "k"}
    with pytest.raises(ValueError, match="--upstream-api-key: expected a line 'URL KEY'"):
        options.upstream_keys(parsed("--upstream", a, "--upstream", b, "--upstream-api-key", "k"))
    monkeypatch.setenv("LLMREF_UPSTREAM_API_KEY", f"{a} k\n{b} l")
    assert options.upstream_keys(parsed("--upstream", a, "--upstream", b)) == {a: "k", b: "l"}
    with pytest.raises(ValueError, match="got another line"):
        options.upstream_keys(parsed("--upstream", a))
    monkeypatch.setenv("LLMREF_UPSTREAM_API_KEY", f"secret {a}")
    with pytest.raises(ValueError, match="another line") as caught:
        options.upstream_keys(parsed("--upstream", a))
    assert "secret" not in str(caught.value)  # the log of a start is read by many
