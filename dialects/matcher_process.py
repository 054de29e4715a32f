"""The matcher process: it compiles and follows a grammar, so that no grammar can delay or crash the server.

    python matcher_process.py TOKENIZER [EOS,EOS] FD   the root: builds the token trie, then forks
    fork --what to check and compile--> a mask, or an error; then tokens --> a mask, until the end of file

llguidance compiles some small schemas for minutes, such as one with a large multipleOf, and one mask can take
it 0.2 s. It drops Python's lock meanwhile, but a thread cannot be ended. A process can. The root has the
tokens in memory and one thread, so that forks share them and start within 2 ms. One fork follows one grammar
for one answer.

Authority: https://github.com/guidance-ai/llguidance; setitimer(2) and getrlimit(2) for the limits.

Rules of this file:
1. The system limits the processor time and the memory of a fork, and ends a fork that exceeds them. Its
   connection then ends without an answer, which means: too costly.
2. Nothing outlives the server for long: the root ends with its socket, a fork with its connection, after what
   it computes at the moment.
3. An error that a client will read is one line, of at most MAX_ERROR characters.

Not here: the other end of the sockets (matchers.py), the grammars (structured_output.py).
"""

import gc
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

MAX_COMPILE_S = 0.25  # processor time. The schemas of an agent's tools take some 10 ms
MAX_MASK_S = 1.0  # processor time for one mask. The library's own limits end most masks after 0.2 s
MAX_BYTES = 128 * 2**20  # of memory beside the root's. The largest of usual grammars take some 20 MB
NICENESS = 5  # the engine's threads come first: all clients wait for those
MAX_ERROR = 300  # characters

TOO_COSTLY = (
    f"to follow it takes more than {MAX_COMPILE_S} s of computing or {MAX_BYTES // 2**20} MB of memory; "
    "use smaller numbers (multipleOf, bounds, lengths, repetitions), fewer alternatives or less depth"
)

# The first byte of an answer gives its kind.
MASK, ERROR = b"m", b"e"


def main(tokenizer: str, eos_token_ids: str, fd: str) -> None:
    """Be the root: fork for each connection that comes, until the server's end is closed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is for the server, whose streams have a grace
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets forks that have ended
    tokens = LLTokenizer(tokenizer, eos_token=json.loads(eos_token_ids))
    gc.freeze()  # the collector no longer writes to these pages, so forks share them
    with socket.socket(fileno=int(fd)) as orders:
        while True:
            _, fds, _, _ = socket.recv_fds(orders, 1, 1)
            if not fds:
                return
            with Connection(fds[0]) as connection:
                if os.fork() == 0:
                    try:
                        orders.close()
                        follow(tokens, connection)
                    finally:
                        os._exit(0)


def follow(tokens: LLTokenizer, connection: Connection) -> None:
    """Answer for one grammar, in a fork, until the other end is closed."""
    limit_process()
    with suppress(EOFError):
        max_compile_s, lark, parts = connection.recv()  # from matchers.Constraint
        token_ids = connection.recv()
        limit_work(max_compile_s)
        matcher = matcher_of(tokens, lark)
        while True:
            matcher.consume_tokens(token_ids)
            answer = MASK + matcher.compute_bitmask()
            if matcher.is_error():
                answer = ERROR + json.dumps(problem(tokens, matcher, parts)).encode()
            connection.send_bytes(answer)
            token_ids = connection.recv()
            limit_work(MAX_MASK_S)


# --- limits -------------------------------------------------------------------------------------------------


def limit_process() -> None:
    """Limit the memory of this process, its share of the processors, and its last words."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # a system without /proc
        n_pages = int(Path("/proc/self/statm").read_bytes().split()[0])
        max_bytes = n_pages * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())  # Rust prints the grammar at which it panics


def limit_work(max_s: float) -> None:
    """Let the system end this process after so many more seconds of computing; waiting takes none."""
    signal.setitimer(signal.ITIMER_PROF, max_s)


# --- grammars and masks -------------------------------------------------------------------------------------


def matcher_of(tokens: LLTokenizer, lark: str) -> LLMatcher:
    return LLMatcher(tokens, LLMatcher.grammar_from_lark(lark), log_level=0)


def problem(tokens: LLTokenizer, whole: LLMatcher, parts: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """Return what is wrong, and the name of the first part that fails by itself, "" if none does."""
    for name, lark in parts:
        part = matcher_of(tokens, lark)
        part.compute_bitmask()
        if part.is_error():
            return one_line(part.get_error()), name
    return one_line(whole.get_error()), ""


def one_line(message: str) -> str:
    """Return the first line; for a regular expression also the line with the reason."""
    first = message.rpartition("failed to compile JSON schema: ")[2].partition("\n")[0]
    reason = message.partition("\nerror: ")[2].partition("\n")[0]
    return f"{first} {reason}".strip()[:MAX_ERROR]


if __name__ == "__main__":
    main(*sys.argv[1:])
