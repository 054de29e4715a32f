"""What the relay costs, as a case of http: a scripted upstream, asked directly and through this server.

upstream() --> [server.py --upstream] --http.cases()--> time to the first text, events a second, by way
"""

import argparse
import asyncio
import json
import re

import sse
from benches.harness import number_option, report, started
from benches.http import RESPONSES, cases

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\n\r\n"
MODELS = b'{"object":"list","data":[{"id":"bench"}]}'
CHUNK = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"bench",%s}\n\n'
TEXT = CHUNK % b'"choices":[{"index":0,"delta":{"content":" token"}}]'
END = CHUNK % b'"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]'


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request: with as many texts as it asks for, or with the list of models."""
    request = await reader.readuntil(b"\r\n\r\n")
    if request.startswith(b"GET"):
        writer.write(HEAD % b"application/json" + MODELS)
    else:
        [length] = re.findall(rb"content-length: *(\d+)", request, re.IGNORECASE)
        n_texts = json.loads(await reader.readexactly(int(length)))["max_tokens"]
        writer.write(HEAD % b"text/event-stream")
        for _ in range(n_texts):
            writer.write(TEXT)
            await writer.drain()
        writer.write(END + sse.DONE)
    await writer.drain()
    writer.close()


async def upstream() -> None:
    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(f"listening http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", flush=True)
    await listening.serve_forever()


def run(args: argparse.Namespace) -> None:
    with started("-m", "benches.relay") as direct:
        flags = ["--upstream", f"{direct.url}/v1", "--port", "0", "--log-level", "warning"]
        with started("server.py", *flags) as front:
            urls = {
                "direct": f"{direct.url}/v1",
                "chat": f"{front.url}/v1",
                "responses": f"{front.url}/v1{RESPONSES}",
            }
            found = cases(urls, [1, 32], args.new)
            report(args, "A scripted upstream, directly and through `server.py --upstream`.", found)


def options(add: argparse.ArgumentParser) -> None:
    number_option(add, "--new", 4000, "events of a stream")


if __name__ == "__main__":
    asyncio.run(upstream())
