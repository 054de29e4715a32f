"""Claude Code from its npm package against this server, in a network namespace that has loopback alone.

    npm install --prefix DIR @anthropic-ai/claude-code
    python tests/claude_code.py DIR --write      one agent session; its requests go to results/claude-code.md

A scripted upstream says what a model would: a thought and two calls at once, of which one fails, then a text.
So what is tested is our /v1/messages, in front of it.
"""

import argparse
import fcntl
import json
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the server's modules

from helpers.serving import ROOT, serve
from helpers.upstream import DONE, USED, Exchange, delta, finish, head, upstream

PAGE = ROOT / "results/claude-code.md"
SAID = "The first command worked, the second failed."
COMMANDS = ("echo it works", "cat /no/such/file")
IFF_UP, SIOCSIFFLAGS = 1, 0x8914


def answer(exchange: Exchange) -> None:
    """Call the shell twice, if it is offered and has not been called yet; else say how it went."""
    body = exchange.body
    names = {tool["function"]["name"] for tool in body.get("tools", ())}
    has_called = any(message["role"] == "tool" for message in body["messages"])
    if "Bash" not in names or has_called:
        exchange.send(head() + delta(content=SAID) + finish() + USED + DONE)
        return
    calls = [
        {"index": i, "id": f"call_{i}", "type": "function",
         "function": {"name": "Bash", "arguments": json.dumps({"command": command, "description": "Try."})}}
        for i, command in enumerate(COMMANDS)
    ]  # fmt: skip
    said = delta(reasoning_content="Both at once.") + delta(tool_calls=calls)
    exchange.send(head() + said + finish("tool_calls") + USED + DONE)


def session(folder: Path) -> Iterator[str]:
    """Run one session; yield the lines of the page."""
    (command,) = map(str, folder.glob("node_modules/@anthropic-ai/claude-code-*/claude"))
    with (
        tempfile.TemporaryDirectory() as home,
        upstream(answer) as model,
        serve("--upstream", model.url, model=None) as server,
    ):
        more = {"HOME": home, "ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "any"}
        more |= {"ANTHROPIC_MODEL": "m", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        options: Any = {"env": os.environ | more, "cwd": home, "capture_output": True, "text": True}
        options |= {"timeout": 120, "stdin": subprocess.DEVNULL}
        words = [command, "-p", "Run both commands.", "--output-format", "json", "--allowedTools", "Bash"]
        done = subprocess.run(words, **options)
        assert done.returncode == 0, (done.stdout, done.stderr, server.log())
        result = json.loads(done.stdout)
        version = subprocess.run([command, "--version"], **options).stdout
        log = server.log()
    told = [message for message in model.exchanges[-1].body["messages"] if message["role"] == "tool"]
    assert result["result"] == SAID, result
    how = f"{result['num_turns']} turns, result {result['subtype']}"
    yield f"{version.strip()}: {how}: {result['result']!r}."
    yield "\n## What it asked of this server\n\n```text"
    yield from re.findall(r"(?:POST|GET|HEAD) /[^\n]*: \d+|accepted, and without[^\n]*", log)
    yield "```\n\n## What its upstream was asked\n\n```text"
    for exchange in model.exchanges:
        roles = " ".join(message["role"] for message in exchange.body["messages"])
        n_tools = len(exchange.body.get("tools", ()))
        yield f"{n_tools} tools, max_tokens {exchange.body['max_tokens']}: {roles}"
    yield "```\n\n## The results of its two calls, as the model gets them\n\n```text"
    yield from (message["content"] for message in told)
    yield "```"


def main() -> None:
    parser = argparse.ArgumentParser(description="One session of Claude Code.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help=f"put it into {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    if os.environ.get("ALONE") != "1":  # once more, with loopback alone
        words = ["unshare", "-rn", sys.executable, *sys.argv]
        sys.exit(subprocess.run(words, env=os.environ | {"ALONE": "1"}).returncode)
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    text = "# A session of Claude Code over /v1/messages\n\n"
    text += "Made by `python tests/claude_code.py DIR --write`.\n\n"
    text += "\n".join(session(args.folder)) + "\n"
    if args.write:
        PAGE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
