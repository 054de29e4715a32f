"""What bench.py server measures: our server with an engine that only says a token, and the least of servers.

    python -m benches.served ours|least|stored MODEL PORT [N]

`ours` is the whole server. `stored` is that with a store that has N responses and keeps no more. `least` is a
small Starlette application: it decodes each token in one task and frames it in another, without a parser, a
state machine, or a log to resume from. Its chat completions are scripted, for a front to pass on.
"""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import server
import sse
from benches.harness import prose
from engine import SWITCH_INTERVAL_S, OnStep, StepOutput
from sampling import Choice
from scheduler import Sequence
from service import loading
from store import Retention, Row, Store
from tokenizer import Decoder, Tokenizer

PLACE = '"item_id":"msg_0123456789abcdef","output_index":0,"content_index":0'
CHUNK = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"bench","choices":[%s]}\n\n'
TEXT = CHUNK % b'{"index":0,"delta":{"content":" token"}}'
END = CHUNK % b'{"index":0,"delta":{},"finish_reason":"stop"}'


async def tick(ms: int) -> None:
    """Wait for the next of the moments that all processes of this machine agree on; 0: do not wait."""
    await asyncio.sleep((ms - 1e3 * time.monotonic() % ms) / 1e3 if ms else 0)


def ours(*flags: str) -> None:
    """Serve an engine that says a token over and over: one a tick, whose milliseconds are the seed."""
    said = StepOutput([Choice(token_id)])

    async def generate(sequence: Sequence, on_step: OnStep) -> None:
        for n_left in range(sequence.max_tokens - 1, -1, -1):
            await tick(sequence.sampling.seed)
            on_step(said if n_left else said._replace(finish="length"))

    def make_runner(*given: Any) -> Any:
        _, _, config, length, _ = given
        return SimpleNamespace(config=config, max_seq_len=length, generate=generate, busy=bool, close=int)

    vars(loading).update(make_runner=make_runner, Engine=lambda runner, _: runner, facts=lambda *_: {})
    sys.argv[1:] = ["--model", model, "--port", port, "--log-level", "warning", *flags]
    server.main()


def stored(n: str) -> None:
    """Serve with a store that is full, unless n is 0."""
    now = time.time()
    # id, owner, born_at, ended_at, kept, background, streamed; JSON of request and items; status, JSON of it
    row = Row("", "", now, now, True, False, False, "{}", "[]", "completed", prose(2000))
    with TemporaryDirectory() as folder:
        with closing(Store(f"{folder}/store", Retention())) as store:
            for number in range(int(n)):
                store.write(row._replace(id=f"resp_{number}"))
        limits = ["--store-max-bytes", "1000000000000000", "--store-max-responses", str(int(n) or 10**6)]
        ours("--store", f"{folder}/store", *limits)


def least() -> None:
    async def respond(http: Request) -> Response:
        body = await http.json()
        n_tokens = body["max_output_tokens"]
        texts = asyncio.Queue[str]()

        async def generate() -> None:
            decoder = Decoder(tokenizer)
            for _ in range(n_tokens):
                await tick(body["seed"])
                for piece in decoder.feed(token_id):
                    texts.put_nowait(piece.text)

        async def frames() -> AsyncGenerator[bytes]:
            generating = asyncio.create_task(generate())
            for number in range(n_tokens):
                data = f'{{"sequence_number":{number},{PLACE},"delta":{sse.dumps(await texts.get())}}}'
                yield f"event: response.output_text.delta\ndata: {data}\n\n".encode()
            await generating

        return StreamingResponse(frames(), media_type="text/event-stream")

    async def complete(http: Request) -> Response:
        n_tokens = (await http.json())["max_tokens"]
        return Response(TEXT * n_tokens + END + sse.DONE, media_type="text/event-stream")

    models = JSONResponse({"object": "list", "data": [{"id": "bench"}]})
    endpoints: sse.Object = {"responses": respond, "chat/completions": complete, "models": models}
    routes = [Route(f"/v1/{path}", answer, methods=["GET", "POST"]) for path, answer in endpoints.items()]
    server.tune_garbage_collector()
    uvicorn.run(
        Starlette(routes=routes), port=int(port), log_level="warning", access_log=False, loop="asyncio"
    )


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as an engine does
    _, name, model, port, *more = sys.argv
    tokenizer = Tokenizer(Path(model) / "tokenizer.json")
    token_id = tokenizer.encode(" a")[0]
    globals()[name](*more)
