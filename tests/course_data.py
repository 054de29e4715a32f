"""What each chapter of the course shows as data: made by the server's own modules, in this process.

chapter --BLOCKS[chapter]()--> its lines --written()--> the page; its sessions (>>>) are run as well

python tests/course_data.py             prints the blocks
python tests/course_data.py --write     puts each into its chapter, its picture beside, and chapter 4's
                                        run into the page's second view; a test checks all
"""

import argparse
import asyncio
import contextlib
import doctest
import io
import itertools
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # the server's modules

import explore
import sse
from benches.decoding import SHAPES
from channels import Arguments, Call, Delta, Finish, Parser, Piece
from checkpoint.config import parse_config, read_config
from checkpoint.weights import n_params
from devices.cuda import CudaOps
from dialects.families import DIALECTS
from event_log import EventLog
from gateway.answers import Answer, Asked
from gateway.metering import Meter
from gateway.outputs import Outputs
from helpers.device_ops import MODELS
from helpers.emulator import Emulator
from helpers.scripted import counted_ids
from model import PAGE, Batch, NumpyOps, Span
from pages import PagePool, prefix_hash, root_hash
from responses import Builder, fold, label
from sampling import Context, Sampling, apply_penalties, apply_temperature, apply_top_p, draw
from scheduler import prompt_lookup
from tokenizer import Decoder, Tokenizer
from walkthrough import ROOT, TINY, in_page, shown

sys.argv, ARGUMENTS = ["micro.py", str(TINY)], sys.argv  # micro.py reads its arguments when it is imported
from course import micro  # noqa: E402
from course_pictures import PICTURES, picture, three_requests  # noqa: E402

sys.argv = ARGUMENTS

MAX_WIDTH = 114
END = "the end of a session"
ENGINE_VIEW = ROOT / "service" / "engine.html"

Lines = Iterator[str]


def tokens() -> Lines:
    """Chapter 1: a text as token ids, and back."""
    tokenizer = Tokenizer(TINY / "tokenizer.json")
    token_ids = tokenizer.encode("Well done 🙂!")
    yield f"tokenizer.Tokenizer.encode('Well done 🙂!') -> {token_ids}"
    yield "\n  id  its bytes          Decoder.feed()"
    decoder = Decoder(tokenizer)
    for token_id in token_ids:
        data = tokenizer.token_bytes(token_id)
        yield f"{token_id:4}  {data!s:18} {listed(decoder.feed(token_id))}"
    yield "\nthe same, cut before its last two tokens"
    decoder = Decoder(tokenizer)
    for token_id in token_ids[:-2]:
        decoder.feed(token_id)
    yield f"      Decoder.close()    {listed(decoder.close())}"
    yield ""
    for text in ("<|im_end|>", "<|im_", "end|>"):
        yield f"{text!r:13} {tokenizer.encode(text)}"


def listed(found: Iterable[Any], nothing: str = "nothing yet") -> str:
    return ", ".join(map(shown, found)) or nothing


def forward_pass() -> Lines:
    """Chapter 2: the rows of three steps, which keys each of them sees, and what a row costs."""
    c = read_config(TINY)
    prompt = [2040, 280, 260, 198, 760]
    steps = {
        "prefill, the first three tokens": Span(0, [7], prompt[:3], 0, 0),
        "prefill, the other two": Span(0, [7], prompt[3:], 3, 1),
        "decode, the token that was chosen": Span(0, [7], [2046], 5, 1),
    }
    for name, span in steps.items():
        batch = Batch([span])
        yield f"{name}: model.Batch() has {len(batch.token_ids)} rows"
        yield "    token  position  page, place  keys that the row sees  wanted"
        for row, (token_id, position) in enumerate(zip(batch.token_ids, batch.positions, strict=True)):
            place = f"{batch.pages[row]}, {batch.offsets[row]}"
            keys = "■" * (position + 1) + "·" * (5 - position)
            wanted = "logits" if row in batch.wanted_rows else ""
            yield f"    {token_id:5}  {position:8}  {place:11}  {keys:22}  {wanted}"
    n_heads = c.n_heads + 2 * c.n_kv_heads
    shapes = {"qkv": (c.dim, n_heads * c.head_dim), "out": (c.n_heads * c.head_dim, c.dim)}
    shapes |= {"gate_up": (c.dim, 2 * c.hidden_dim), "down": (c.hidden_dim, c.dim)}
    yield "\nthe matrices of one layer, and the multiplications of one row"
    n_products = 0
    for name, (n_in, n_out) in shapes.items():
        yield f"    {name:8} {n_in:4} x {n_out:4} {n_in * n_out:8,}"
        n_products += n_in * n_out * c.n_layers
    n_head = c.dim * c.vocab_size
    yield f"    {c.n_layers} layers        {n_products:8,}   and {n_head:,} more for the logits of a row"
    n_numbers = 2 * c.n_kv_heads * c.head_dim * c.n_layers
    yield f"    to keep     {n_numbers:8,} numbers in the KV cache, {PAGE * n_numbers * 4:,} bytes a page"
    large = parse_config(SHAPES["qwen3-8b"], {})
    yield "\n                   weights, GB   KV cache, KB a token   tokens a GB"
    for name, of, ops in (("this model", c, NumpyOps), ("Qwen3-8B", large, CudaOps)):
        a_token = ops.page_bytes(of) / PAGE
        yield f"    {name:12} {2 * n_params(of) / 1e9:13.3f} {a_token / 1e3:22.1f} {1e9 / a_token:13,.0f}"


def pages() -> Lines:
    """Chapter 3: three pages that are taken, registered, found, shared, freed and evicted."""
    pool = PagePool(3)
    first, second = [*range(PAGE)], [*range(PAGE, 2 * PAGE)]
    one = prefix_hash(root_hash("ann"), first)
    two = prefix_hash(one, second)
    alone = prefix_hash(root_hash("ann"), second)
    other = prefix_hash(root_hash("bob"), first)
    names = {one: "ann: 0 to 63", two: "ann: 0 to 127", alone: "ann: 64 to 127", other: "bob: 0 to 63"}
    yield "prefix_hash() of                its first bytes"
    for page_hash, name in names.items():
        yield f"    {name:27} {page_hash.hex()[:12]}"
    yield "\nwhat happens                    n_free  in the prefix cache"

    def state(what: str) -> str:
        cached = {page: name for found, name in names.items() if (page := pool.find(found)) is not None}
        listed = ", ".join(f"{page} = {name}" for page, name in sorted(cached.items()))
        return f"    {what:27} {pool.n_free:6}  {listed or 'nothing'}"

    yield state("at the start")
    table = [pool.take(), pool.take()]
    yield state(f"A: take() -> {table}")
    pool.register(table[0], one)
    pool.register(table[1], two)
    yield state("A: register() both")
    pool.release(table)
    yield state("A ends: release()")
    found = pool.find(one)
    assert found is not None
    pool.share(found)
    yield state(f"B: find() -> {found}, share()")
    yield state(f"B: find(64 to 127) -> {pool.find(alone)}")
    yield state(f"bob: find() -> {pool.find(other)}")
    for _ in range(2):
        yield state(f"C: take() -> {pool.take()}")


def batching() -> Lines:
    """Chapter 4: what schedule() returns, step by step, with four pages and then with too few."""
    run = three_requests()
    lengths = {"ABC"[share["sequence"]]: share["n_prompt"] for step in run for share in step["sequences"]}
    prompts = ", ".join(f"{name} {n}" for name, n in lengths.items())
    yield f"Tokens of the prompts: {prompts}. Each has 8 tokens of output. There are 4 pages of {PAGE}."
    yield f"\nstep  {'A':18}{'B':18}{'C':18}n_free  waiting"
    columns = dict.fromkeys(lengths, "-")
    for step in run:
        columns = {name: "has ended" if column != "-" else "-" for name, column in columns.items()}
        for share in step["sequences"]:
            does = "preempted" * bool(share["preempted_for"]) or "-"
            if "phase" in share:
                does = f"{share['phase']} {share['start']}:{share['end']}"
            columns["ABC"[share["sequence"]]] = does
        shares = "".join(f"{column:18}" for column in columns.values())
        waiting = " ".join("ABC"[number] for number in step["waiting"]) or "-"
        yield f"{step['step']:4}  {shares}{step['n_free_pages']:6}  {waiting}"
    yield "\ntests/explore.py: pages of 2 tokens, and a bug: a shared page is freed by the first who leaves"
    (bug,) = (bug for bug in explore.bugs() if bug.undoes.startswith("a page that two use is freed"))
    yield from (f"  {i}. {line}" for i, line in enumerate(explore.found(bug, "turns")[1], 1))


def sampling() -> Lines:
    """Chapter 5: six logits become a token; a mask; drafts."""
    words = ["cat", "dog", "mat", "sat", "the", "."]
    logits = np.log(np.array([32, 16, 8, 4, 2, 1], np.float32))
    hot = Sampling(temperature=2, top_p=0.8, frequency_penalty=0.5)
    yield f"{'':44}{''.join(f'{word:>7}' for word in words)}"

    def row(name: str, numbers: Iterable[float]) -> str:
        return f"{name:44}{''.join(f'{number:7.2f}' for number in numbers)}"

    yield row("logits", logits)
    yield row('apply_penalties(), "cat" was said twice', apply_penalties(logits, Context(hot, [], [0, 0])))
    yield row("apply_temperature(1), the likeliest is 1", apply_temperature(logits, 1))
    probs = apply_temperature(logits, 2)
    yield row("apply_temperature(2)", probs)
    kept = apply_top_p(probs, hot.top_p)
    yield row("apply_top_p(0.8)", kept)
    yield row("where each ends, of a whole of 1", np.cumsum(kept) / kept.sum())
    for u in (0.1, 0.6, 0.99):
        yield f"draw(u = {u}) -> {words[draw(kept, u)]}"
    mask = np.array([False, False, True, True, False, False])
    yield row("a mask, in apply_penalties()", apply_penalties(logits, Context(Sampling(), [], [], mask)))
    yield ""
    text = np.array([5, 6, 7, 8, 9, 5, 6])
    for said in (text, text[:-1]):
        yield f"prompt_lookup({said.tolist()}, 3) -> {prompt_lookup(said, 3)}"


def channels() -> Lines:
    """Chapter 6: the pieces of an answer, and what the parser makes of each."""
    hermes = DIALECTS["hermes"]._replace(tokens=frozenset(["<think>", "</think>"]))
    yield "<think> is a token of this vocabulary; <tool_call> is text, and comes in two pieces"
    yield f"\n{'piece':36} Parser.feed()"
    parser = Parser(hermes, stop=["END"])
    texts = ["<think>", "\nI call.", "\n", "</think>", "One <th", "ink> E", "ach.", "\n<tool_"]
    texts += ['call>\n{"name": "f', '", "arguments": {"x": "</tool_call>', '"}}\n</tool_call>']
    for text in [*texts, "Bye EN", "D now"]:
        special = text if text in hermes.tokens else ""
        said = f"{text!r} (a token)" if special else repr(text)
        yield f"{said:36} {listed(parser.feed(Piece(text, special)))}"
    yield f"{'Parser.close()':36} {listed(parser.close(cut=False))}"


def events() -> Lines:
    """Chapter 7: what a model said, the events that are made of it, and the builder's state."""
    builder = Builder({"id": "resp_0"}, counted_ids(), "{}: {}".format)
    made: list[dict[str, Any]] = []
    yield f"{'said':36}{'event':36}state"

    def rows(said: str, found: list[dict[str, Any]]) -> Lines:
        made.extend(found)
        lines = [f"{label(event).removeprefix('response.'):36}" for event in found]
        lines[-1] += str(builder.state)
        yield f"{said:36}{lines[0]}"
        yield from (f"{'':36}{line}" for line in lines[1:])

    yield from rows("start()", builder.start())
    for one in (Delta("final", "Hi"), Call("f"), Arguments('{"x": ')):
        yield from rows(shown(one), builder.feed(one))
    finish = Finish("length")
    yield from rows(shown(finish), builder.finish(finish, now=1))
    response = fold(made)
    yield f"\nfold() -> status {response['status']!r}, {response['incomplete_details']}, and the output:"
    for item in response["output"]:
        content = item.get("arguments", item.get("content"))
        yield f"    {item['id']:6} {item['type']:14} {item['status']:11} {sse.dumps(content)}"


def frames() -> Lines:
    """Chapter 8: bytes that were cut anywhere, and the events in them."""
    stream = "data: {\r\ndata: }\r\n\r\n: ping\n\nevent: a\rdata:  ü\r\rdata: cut".encode()
    cuts = [0, 8, 19, 21, 32, 46, 48, len(stream)]
    parser = sse.Parser()
    yield "chunk                          the line so far     data so far    Parser.feed()"
    for start, end in itertools.pairwise(cuts):
        chunk = stream[start:end]
        found = listed(parser.feed(chunk), "-")
        yield f"{chunk!s:30} {bytes(parser.line)!s:19} {parser.data!s:14} {found}"
    try:
        parser.close()
    except sse.Truncated as error:
        yield f"Parser.close() raises Truncated: {error}"
    yield f"\nsse.encode('one\\ntwo', 'note') -> {sse.encode('one' + chr(10) + 'two', 'note')!r}"


async def log_lines() -> list[str]:
    """Chapter 9: one log, three readers."""
    builder = Builder({"id": "resp_0"}, counted_ids(), "{}: {}".format)
    log = EventLog()
    seen: dict[str, list[int]] = {"from the start": [], "starting_after=3": [], "came late": []}

    async def follow(reader: str, after: int) -> None:
        numbers = itertools.count(after + 1)
        async for frames in log.read(after):
            seen[reader] += itertools.islice(numbers, len(frames))

    lines = [f"{'what happens':24}{'status':14}{''.join(f'{reader:22}' for reader in seen)}".rstrip()]

    async def happens(what: str) -> None:
        for _ in range(9):
            await asyncio.sleep(0)  # every reader has its turn
        read = (f"{numbers[0]} to {numbers[-1]}" if numbers else "-" for numbers in seen.values())
        lines.append(f"{what:24}{log.status:14}{''.join(f'{span:22}' for span in read)}".rstrip())

    readers = [asyncio.create_task(follow("from the start", -1))]
    await happens("nothing yet")
    log.extend(builder.start())
    await happens("start()")
    log.extend(builder.feed(Delta("final", "Hi")))
    await happens("Delta('Hi')")
    readers.append(asyncio.create_task(follow("starting_after=3", 3)))
    await happens("a client comes back")
    log.extend(builder.finish(Finish("cancelled"), now=1))
    log.close()
    await happens("Finish('cancelled')")
    readers.append(asyncio.create_task(follow("came late", -1)))
    await happens("a client comes late")
    await asyncio.gather(*readers)
    return lines


def upstreams() -> Lines:
    """Chapter 10: what another server sent, put right, and what a response is built of."""
    calls = '{{"choices": [{{"delta": {{"tool_calls": [{{"function": {}}}]}}}}]}}'
    sent = [
        '{"choices": [{"delta": {"role": "assistant", "reasoning": "I ask both."}}]}',
        calls.format('{"name": "f", "arguments": {"x": 1}}'),
        calls.format('{"name": "g", "arguments": "{\\"y\\": "}'),
        '{"choices": []}',
        calls.format('{"arguments": "2}"}'),
        '{"choices": [{"delta": {}, "finish_reason": "STOP"}]}',
    ]
    answer = Answer(Meter(), Asked(new_id=counted_ids()))
    reader = Outputs(answer, n_top_logprobs=20)
    for document in sent:
        yield f"sent: {document}"
        yield from put_right(answer.feed(f"data: {document}\n\n".encode()), reader)
    yield "sent: the end of the connection, without [DONE]"
    yield from put_right(answer.close(), reader)
    yield f"    a response    {listed(reader.close(None))}"


def put_right(chunks: list[dict[str, Any]], reader: Outputs) -> Lines:
    for choice in itertools.chain.from_iterable(chunk.get("choices", []) for chunk in chunks):
        ending = f", finish_reason {choice['finish_reason']}" if choice.get("finish_reason") else ""
        yield f"    put right     {sse.dumps(choice.get('delta'))}{ending}"
    if found := listed(reader.read(chunks), ""):
        yield f"    a response    {found}"


TWO_WARPS = """\
extern "C" __global__ void __launch_bounds__(64) total(const float *x, float *y) {
  __shared__ float of_warp[2];
  float sum = x[threadIdx.x];
  for (int m = 16; m; m /= 2) sum += __shfl_xor_sync(~0u, sum, m);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  if (threadIdx.x == 63) y[0] = of_warp[0] + of_warp[1];
}
"""


def kernels() -> Lines:
    """Chapter 11: a sum by 32 lanes, a softmax in splits, what the checker says of a race, and floors."""
    values = [np.float32(x) for x in (micro.WEIGHTS["model.embed_tokens.weight"][700][:32])]
    lanes = np.array(values, np.float32) ** 2
    yield "x: 32 numbers of the token 700, a lane each; what lanes 0 to 3 have after each __shfl_xor_sync()"
    for m in (0, 16, 8, 4, 2, 1):
        lanes = lanes + lanes[np.arange(32) ^ m] if m else lanes
        yield f"    {f'+ that of lane ^ {m}' if m else 'x * x':24}" + "".join(f"{x:12.8f}" for x in lanes[:4])
    in_order = sum((x * x for x in values), np.float32(0))
    yield f"    {'one loop':24}{in_order:12.8f}   {'the same bits' if in_order == lanes[0] else 'other bits'}"
    scores = np.array([1, 3, 2, 90, 0, 91, 5, 4], np.float32)
    yield "\nsplit  its scores    greatest  sum of exp(s - greatest)   so far: greatest, sum"
    top, total = np.float32(-np.inf), np.float32(0)
    for i in range(4):
        split = scores[2 * i : 2 * i + 2]
        own = np.exp(split - split.max()).sum()
        both = max(top, split.max())
        total = total * np.exp(top - both) + own * np.exp(split.max() - both)
        top = both
        yield f"{i:5}  {split.tolist()!s:12} {split.max():9} {own:26.6f} {top:11} {total:14.6f}"
    yield f"all at once           {scores.max():9} {np.exp(scores - scores.max()).sum():26.6f}"
    yield "\na sum by two warps, and what the checker of the emulator says of it"
    yield from (f"    {line}" for line in TWO_WARPS.splitlines())
    cp = Emulator(check=True)
    try:
        arguments = cp.asarray(np.ones(64, np.float32)), cp.zeros(1, np.float32)
        cp.RawModule(code=TWO_WARPS).get_function("total")((1,), (64,), arguments)
        arguments[1].get()
    except RuntimeError as error:
        yield from (f"    {line}" for line in str(error).splitlines())
    yield "\na decode step of Llama-3-8B        read, GB   floor at 3.35 TB/s, ms   tokens a second at most"
    c = MODELS["Llama-3-8B"]
    row = c.dim * (c.n_heads + 2 * c.n_kv_heads + c.n_heads) * c.head_dim + 3 * c.dim * c.hidden_dim
    weights = 2 * (32 * row + c.dim * c.vocab_size)
    token = 2 * 2 * 32 * c.n_kv_heads * c.head_dim
    for n, length in ((1, 1000), (1, 8000), (32, 1000), (32, 8000)):
        n_bytes = weights + n * length * token
        ms = n_bytes / 3.35e9
        yield f"    {n:2} rows, {length} tokens each {n_bytes / 1e9:12.1f} {ms:20.1f} {n / ms * 1000:24.0f}"
    yield f"    at {989 / 3.35:.0f} rows its products (989 Tflop/s) take as long as reading the weights"


BLOCKS: dict[str, Callable[[], Lines]] = dict(zip(PICTURES, (
    tokens, forward_pass, pages, batching, sampling, channels, events, frames,
    lambda: iter(asyncio.run(log_lines())), upstreams, kernels,
), strict=True))  # fmt: skip


def page(chapter: str) -> Path:
    return ROOT / "course" / f"{chapter}.md"


def drawing(chapter: str) -> Path:
    return ROOT / "pictures" / f"{chapter}.svg"


def block(chapter: str) -> str:
    lines = [line.rstrip() for line in BLOCKS[chapter]()]
    cut = [f"{line[: MAX_WIDTH - 2]} …" if len(line) > MAX_WIDTH else line for line in lines]
    return "\n".join([*cut, ""])


def answered(session: str) -> str:
    """Return a session of Python with what Python answers now."""
    names: dict[str, Any] = {}
    text = ""
    for example in doctest.DocTestParser().get_examples(session):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):  # a server's log
            try:
                exec(compile(example.source, "a chapter", "single"), names)
            except Exception as error:
                print("".join(traceback.format_exception_only(error)), end="")
        first, *more = example.source.splitlines()
        text += "\n".join([f">>> {first}", *(f"... {line}" for line in more), printed.getvalue()])
    return text


def written(chapter: str) -> str:
    """Return the page of a chapter with its block and what its sessions answer."""
    text = in_page(block(chapter), "course_data", page(chapter))
    before, *sessions = text.split("```python\n>>> ")
    own = {name: getattr(micro, name) for name in ("generate", "forward", "new_cache")}
    ends = [session.partition("```\n") for session in sessions]
    whole = answered("".join(f">>> {code}>>> {END!r}\n" for code, _, _ in ends))  # one after the other
    vars(micro).update(own)
    answers = whole.split(f">>> {END!r}\n{END!r}\n")
    return before + "".join(
        f"```python\n{answer}```\n{after}" for answer, (_, _, after) in zip(answers, ends, strict=False)
    )


def engine_view() -> str:
    """Return the page's second view with the run of chapter 4, for servers that do not show their steps."""
    before, begin, rest = ENGINE_VIEW.read_text(encoding="utf-8").partition("const CHAPTER_4 = [\n")
    _, end, after = rest.partition("];\n")
    lines = [f"  {sse.dumps(step)},\n" for step in three_requests()]
    return "".join([before, begin, *lines, end, after])


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="What each chapter of the course shows as data.")
    options.add_argument("--write", action="store_true", help="put it into the chapters")
    is_written = options.parse_args().write
    if is_written:
        ENGINE_VIEW.write_text(engine_view(), encoding="utf-8")
    for name in BLOCKS:
        if is_written:
            page(name).write_text(written(name), encoding="utf-8")
            drawing(name).write_text(picture(name), encoding="utf-8")
        else:
            print(f"{name}\n\n{block(name)}")
