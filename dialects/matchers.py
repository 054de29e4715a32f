"""Matchers: the server's end of the processes that follow grammars, one process for one answer.

    AnswerGrammar --Grammars.check()--> nothing, or BadGrammar                 before a request is taken
    AnswerGrammar --Grammars.constraint()--> Constraint --mask()--> the tokens that may come next

A Constraint does not wait: mask() sends the new tokens to the process, and returns the mask if it is there.
So the engine computes the other sequences meanwhile, and a costly grammar delays only its own answer.

    mask([]) -> None       the process starts: it compiles, then makes the mask of the first token
    mask([]) -> array      one token is chosen under it
    mask([17]) -> None     the mask after 17 is not there yet
    close()                the process ends at once

Authority: https://man7.org/linux/man-pages/man7/unix.7.html (SCM_RIGHTS: sockets sent over sockets).

Rules of this file:
1. Only those processes compile and follow the grammar of a client, within their limits.
2. A check waits for its owner's turn, and its outcome is remembered. A Constraint has a process while its
   sequence has a slot of the batch, so there are never more than --max-batch of them.
3. A process that exceeds its limits is killed, so it cannot report an error: if its connection ends without
   an answer, the grammar was too costly, and the request is at fault (400). If no process answers in
   MAX_ANSWER_S, the server is overloaded (503).

Not here: the other end (matcher_process.py), the grammars and their purpose (structured_output.py).
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import closing
from hashlib import blake2b
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dialects import matcher_process
from dialects.json_schema import BadGrammar
from dialects.matcher_process import ERROR, MAX_COMPILE_S, MAX_MASK_S, TOO_COSTLY
from dialects.structured_output import AnswerGrammar
from request.refusals import BadInput
from request.room import Turns

# Checks at once: half of the machine is left to the engine, and threads of the event loop to others.
N_CHECKS = max(1, min(16, (os.cpu_count() or 1) // 2))
MAX_ANSWER_S = 10.0  # by the clock: a process that is swapped out uses no processor
MAX_REMEMBERED = 1024  # outcomes of checks: an agent sends the same tools with every turn

OVERLOADED = f"the grammar could not be checked, or not within {MAX_ANSWER_S:.0f} s; try again later."

Mask = NDArray[np.bool_]  # (vocab_size,)
# Message and part of a BadGrammar; the exception itself would hold on to the grammar.
Problem = tuple[str, str]


class Constraint:
    """One answer under a grammar: a token mask before every token. It is a scheduler.Constraint."""

    def __init__(self, grammars: "Grammars", grammar: AnswerGrammar, max_compile_s: float) -> None:
        self._grammars = grammars
        self._order = (max_compile_s, *grammar)
        self._process: Connection | None = None  # to the process that follows it now
        self._n_told: int | None = None  # tokens of the output that the process has received
        self._mask: Mask | None = None  # after those tokens; None: not there yet
        self._deadline = 0.0  # for the mask that it computes

    def fileno(self) -> int:
        """Return what becomes readable when the mask has come."""
        assert self._process
        return self._process.fileno()

    def mask(self, output: list[int]) -> Mask | None:
        """Return which tokens may come after the output: the eos tokens once the grammar is satisfied.

        None: it is not computed yet. To ask again for the same output costs nothing. Raises OSError if no
        process can be started, or none answers; BadGrammar if the grammar cannot be followed any further.
        """
        if self._process is None:
            self._process = self._grammars.start()
            self._process.send(self._order)
            self._n_told = None
        if len(output) != self._n_told:
            self._process.send(output[self._n_told :])  # all of it, if the process knows nothing yet
            self._n_told = len(output)
            self._mask = None
            self._deadline = time.monotonic() + MAX_ANSWER_S
        if self._mask is None and self._process.poll():
            self._mask = self._grammars.read(self._process)
        if self._mask is None and time.monotonic() > self._deadline:
            raise TimeoutError(f"expected an answer within {MAX_ANSWER_S:.0f} s")
        return self._mask

    def close(self) -> None:
        if self._process:
            self._process.close()
        self._process = None


class Grammars:
    """The processes for one vocabulary."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        eos = json.dumps(eos_token_ids)
        self._command = [sys.executable, matcher_process.__file__, str(tokenizer), eos]
        self._vocab_size = vocab_size
        self._lock = threading.Lock()  # held while we replace the root, or order a fork
        self._root = Root(self._command)
        self.turns = Turns(N_CHECKS)  # of checks: requests that wait for the check of another take none
        self._checks: dict[bytes, asyncio.Task[Problem | None]] = {}  # by digest, the latest last

    async def check(self, grammar: AnswerGrammar, owner: str) -> None:
        """Compile it once; raises BadGrammar if it cannot be enforced, BadInput if the server is too busy.

        A check goes on if its client leaves: others may wait for it.
        """
        digest = blake2b(repr((owner, grammar)).encode()).digest()
        if digest not in self._checks:
            self._checks[digest] = asyncio.create_task(self._problem(digest, grammar, owner))
            if len(self._checks) > MAX_REMEMBERED:
                del self._checks[next(iter(self._checks))]
        if problem := await asyncio.shield(self._checks[digest]):
            raise BadGrammar(*problem)

    async def _problem(self, digest: bytes, grammar: AnswerGrammar, owner: str) -> Problem | None:
        """Wait for the owner's turn and compile the grammar; return what is wrong with it."""
        try:
            async with self.turns.turn(owner):
                return await asyncio.to_thread(self._compile, grammar)
        except BaseException:  # it came to no outcome: the next request checks again
            self._checks.pop(digest, None)
            raise

    def _compile(self, grammar: AnswerGrammar) -> Problem | None:
        """Let a process compile the grammar, wait for its first mask, return what is wrong with it."""
        try:
            with closing(Constraint(self, grammar, MAX_COMPILE_S)) as constraint:
                while constraint.mask([]) is None:
                    wait([constraint.fileno()], MAX_ANSWER_S)
        except OSError as error:  # TimeoutError too
            raise BadInput(OVERLOADED, code="server_is_overloaded") from error
        except BadGrammar as error:
            return str(error), error.part
        return None

    def constraint(self, grammar: AnswerGrammar) -> Constraint:
        """Return a Constraint that follows a checked grammar, for one answer.

        It has more time than the check, so a grammar that passed the check passes here too, even on a busy
        machine.
        """
        return Constraint(self, AnswerGrammar(grammar.lark), MAX_MASK_S)

    def start(self) -> Connection:
        """Start a process that follows a grammar; raises OSError. It ends when its connection is closed."""
        ours, theirs = Pipe()
        with theirs, self._lock:
            if self._root.has_ended():
                self._root = Root(self._command)
            socket.send_fds(self._root.socket, [b"\0"], [theirs.fileno()])
        return ours

    def read(self, process: Connection) -> Mask:
        """Return the mask that has come, or comes now; raises BadGrammar."""
        try:
            answer = process.recv_bytes()
        except (EOFError, OSError) as error:
            if self._root.has_ended():  # the fault is not the grammar's
                raise RuntimeError("the process that follows grammars has ended") from error
            raise BadGrammar(TOO_COSTLY) from error
        if answer.startswith(ERROR):
            raise BadGrammar(*json.loads(answer[1:]))
        # A vocabulary may have fewer tokens than the model, which rounds it up, or more:
        # https://github.com/vllm-project/vllm/pull/33509. Bits that are missing are 0.
        packed = np.frombuffer(answer, np.uint8, offset=1)
        return np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)

    def close(self) -> None:
        self._root.close()


class Root:
    """The process that forks the others; it ends with the server, however that ends."""

    def __init__(self, command: list[str]) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)  # a root that is stopped must not stop the engine's thread
        with theirs:
            # A session of its own: Ctrl-C in the terminal is for the server, which has streams to end.
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno())], pass_fds=[theirs.fileno()], start_new_session=True
            )
        self.close = weakref.finalize(self, self._end, self.socket, self.process)

    def has_ended(self) -> bool:
        """Return whether its end of the socket is closed. It never sends anything."""
        try:
            return self.socket.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:  # reset, because it left something unread; or our end is closed
            return True

    @staticmethod
    def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        connection.close()
        process.kill()
        process.wait()
