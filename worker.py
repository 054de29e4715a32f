"""The Worker contract, and the worker of this machine: a checked Request to the model's output.

    Request --prepare()--> Prompt --Prompt.run()--> take([Accepted]), take([Output, ...]), take([Finish])

The engine in this process and an upstream server (gateway/remote.py) both keep the contract. So streams,
background runs, resuming, chains and calls work with either, and readers of the outputs see no difference.

Why two steps, prepare() and run(), and not one that streams: a refusal needs an HTTP status, which must be
known before the first byte, and a background response is checked when it is posted and run much later. The
price is that a prompt is held, or rendered again, in between.

Rules of this file:
1. prepare() refuses with BadInput, before a byte of the answer has left. It makes every check that this
   machine can make, and waits until the grammar is compiled. run() may refuse too, before its Accepted.
2. run() calls take() with Accepted, then with any number of Outputs and at last with exactly one Finish, and
   returns. After Accepted only a bug or an upstream's late refusal raises: then the caller decides how the
   answer ends. To stop a run, cancel it: the engine drops the sequence, and run() raises CancelledError,
   after take([Finish("cancelled")]), whose usage is for the metrics alone.
3. take() is synchronous: the outputs of a step, of all sequences, become events in one turn of the event
   loop.
4. Usage counts the tokens that were read from the engine, including a stop token, but nothing after a stop
   string. Finish("cancelled") has the count at that time, if the engine has computed a token.
5. An answer ends with "length" after max_output_tokens, after --max-output-tokens, where the context ends,
   and after MAX_LOGPROBS logprobs, which all choices share: a token may have 21 of them, and the events that
   end an item repeat them.
"""

import asyncio
import bisect
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

from channels import Accepted, Finish, Output, Parser, Piece, Take, TokenLogprob, Usage
from dialects import families
from dialects.json_schema import BadGrammar
from dialects.matchers import Grammars
from dialects.structured_output import AnswerGrammar, Thinking, answer_grammar
from engine import Engine, StepOutput
from request import items
from request.ids import REQUEST_ID
from request.messages import Messages, turn_starts, without_old_turns
from request.params import ALIAS, Request
from request.refusals import BadInput
from request.room import Threads
from request.special_tokens import SpecialTokens
from request.template import ChatTemplate
from request.tools import StructuredOutput
from sampling import Choice, Sampling
from scheduler import Sequence
from sse import Object
from tokenizer import Decoder, Tokenizer

FEW_CHARACTERS = 1024  # of a short prompt
CHARACTERS_A_MESSAGE = 50  # to render a message takes as long as so many characters of it
MAX_LOGPROBS = 75_000  # of a request, some 8 MB of JSON: about 3,500 tokens with top_logprobs 20

# The tokenizer takes up to 300 bytes and 5 us a token, so a prompt that is far too long must not reach it.
# Text has 3 to 5 characters a token: a prompt with more than this for each token of the context is refused.
CHARACTERS_PER_TOKEN = 8


# --- the contract -------------------------------------------------------------------------------------------


class Prompt(Protocol):
    """A checked request that its worker has prepared to run. The event loop alone calls it."""

    @property
    def request(self) -> Request: ...
    @property
    def headers(self) -> dict[str, str]: ...  # of the HTTP answer, such as an upstream's Warning

    @property
    def token_ids(self) -> list[int]: ...  # raises BadInput, if it is another server that renders it

    async def run(self, take: Take, choice: int = 0) -> None:
        """Pass the model's output for one of the request's n choices to `take`, step by step."""


class Worker(Protocol):
    """Serves requests with its models. The event loop alone calls it."""

    defaults: Mapping[str, Any]  # of parameters, by name: the model's own

    @property
    def alive(self) -> bool: ...  # False: it can serve no request now

    async def prepare(self, request: Request) -> Prompt:
        """Check what only this worker can check, the grammar included; raises BadInput."""

    def serves(self, model: str) -> bool:
        """Return whether it has the model; raises BadInput if it cannot tell now."""

    def models(self) -> dict[str, Object]: ...  # as /v1/models shows them, by name
    def busy(self) -> bool: ...  # a request is in flight
    def counts(self) -> dict[str, int]: ...  # requests, pages and so on, for /health and /metrics

    async def close(self) -> None:
        """Fail what is in flight."""


# --- the worker of this machine -----------------------------------------------------------------------------
# Called in this order: Workers.prepare(), LocalWorker.prepare(), LocalPrompt.run(), Answer.feed().


class LocalPrompt(NamedTuple):
    """A request that the engine will serve."""

    worker: "LocalWorker"
    request: Request
    headers: dict[str, str]
    token_ids: list[int]
    max_tokens: int
    stop_token_ids: frozenset[int]
    sampling: Sampling  # of the first choice
    parser: Callable[[], Parser]  # makes one for an answer
    grammar: AnswerGrammar | None  # structured output; None: the answer is free

    async def run(self, take: Take, choice: int = 0) -> None:
        """Pass the model's output for one choice to `take`, step by step."""
        answer = Answer(self)
        sequence = Sequence(
            self.token_ids,
            self.max_tokens,
            self.stop_token_ids,
            replace(self.sampling, choice=choice),
            self.grammar and self.worker.grammars.constraint(self.grammar),
            self.request.owner,
            REQUEST_ID.get(),
        )

        accepted = Accepted(len(self.token_ids))  # prepare() has checked all: only an upstream may refuse
        is_queued = self.request.background  # until an output without tokens says that it begins

        def on_step(output: StepOutput) -> bool:
            nonlocal is_queued
            if is_queued:
                is_queued = False
                take([accepted])
            take(answer.feed(output))
            return not answer.has_finished

        if not is_queued:
            take([accepted])
        try:
            await self.worker.engine.generate(sequence, on_step)
        except asyncio.CancelledError:
            if not answer.has_finished:
                is_computed = answer.usage.output_tokens > 0  # else the prompt may not have been
                take([Finish("cancelled", answer.usage if is_computed else None)])
            raise

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def rendered(self) -> Object:
        """Return what the model reads: [text, special token] pieces, token ids; and the template."""
        decoder = Decoder(self.worker.tokenizer)
        shown = [(piece.text, piece.special) for id_ in self.token_ids for piece in decoder.feed(id_)]
        template = self.worker.template
        if self.request.tools:
            template = template.with_tools
        return {"prompt": shown, "token_ids": self.token_ids, "template": template.source}


@dataclass(eq=False)
class LocalWorker:
    """Turns requests into prompts for the engine of this process."""

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate
    grammars: Grammars
    dialect: str | None  # the name of one, in place of that of the template
    names: list[str]  # of the model, in requests
    defaults: Mapping[str, Any]  # of parameters, by name: the model's own
    max_output_tokens: int  # of an answer; a request may ask for fewer

    def serves(self, model: str) -> bool:
        return model in (*self.names, ALIAS)

    async def prepare(self, request: Request) -> LocalPrompt:
        try:
            if is_short(request):  # this takes less time than to ask a thread
                prompt = self._prepare(request)
            else:  # in a thread: it must not stop the streams
                prompt = await self._threads.call(request.owner, self._prepare, request)
            if prompt.grammar:
                await self.grammars.check(prompt.grammar, request.owner)
        except BadGrammar as error:
            raise grammar_refused(error, request) from error
        return prompt

    def _prepare(self, request: Request) -> LocalPrompt:
        """Render, tokenise and check, in any thread; raises BadInput or BadGrammar."""
        if request.truncate:
            text, token_ids = self._render_to_fit(request)
        else:
            text, token_ids = self._encode(request, request.messages)
        self._check_token_ids(request, token_ids)
        n_free = self.engine.max_seq_len - len(token_ids)
        max_tokens = min(request.max_tokens or n_free, self.max_output_tokens, n_free)
        if request.tools and not request.called:  # tool_choice is none
            request = self._without_calls(request)
        source = self.template.with_tools.source
        may_call = request.called and not request.structured_output  # else a grammar writes its calls
        if may_call and not families.teaches_calls(source, self.dialect_name):  # its calls will be text
            request = replace(request, not_run=(*request.not_run, "tools"))

        added = self.tokenizer.added
        dialect = families.find(self._family, added, source, bool(request.called))
        state, after_marker = families.opening(text, dialect)
        stop_token_ids = frozenset(request.stop_token_ids)
        # The grammar of structured output has its own end, and allows nothing after it.
        if request.structured_output or not request.ignore_eos:
            stop_token_ids |= {*self.engine.config.eos_token_ids}
        grammar = None
        if request.structured_output:
            thinking: Thinking = "over" if after_marker else "possible"  # where the prompt ends
            if state == "analysis":
                thinking = "open"
            grammar = answer_grammar(request.structured_output, dialect, added, thinking)
        sampling = Sampling(n_top_logprobs=request.n_top_logprobs, **request.sampling)
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        schemas = {name: tool.schema() for name, tool in request.called.items()}
        parser = partial(
            Parser,
            dialect,
            state,
            after_marker,
            request.stop,
            one_call=not request.parallel_tool_calls,
            schemas=schemas,
        )
        return LocalPrompt(
            self, request, {}, token_ids, max_tokens, stop_token_ids, sampling, parser, grammar
        )

    def _encode(self, request: Request, messages: Messages) -> tuple[str, list[int]]:
        """Return the prompt's last text and the token ids of all of it; raises PromptTooLong early."""
        limit = self.engine.max_seq_len
        prompt = ""
        n_characters = sum(len(message["content"]) for message in messages)
        arguments = messages, request.tools, datetime.now()
        # Rendered twice: as the model reads it, and with the template's own text marked (special_tokens.py).
        if n_characters <= CHARACTERS_PER_TOKEN * limit:  # else it is not even rendered
            prompt = self.template.render(*arguments, **request.template_kwargs)
            n_characters = len(prompt)
        if n_characters > CHARACTERS_PER_TOKEN * limit:
            raise PromptTooLong(limit, f"{n_characters} characters")
        trace = self.template.render(*arguments, True, **request.template_kwargs)
        texts = self._special_tokens.cut(prompt, trace)
        token_ids = self.tokenizer.encode(*texts)
        if not 0 < len(token_ids) < limit:
            raise PromptTooLong(limit, str(len(token_ids)))
        return texts[-1], token_ids

    def _check_token_ids(self, request: Request, prompt: list[int]) -> None:
        """Refuse ids without an embedding: one of them would fail its step, also for others."""
        vocab_size = self.engine.config.vocab_size
        bias = request.sampling["logit_bias"]
        given = {"logit_bias": bias, "stop_token_ids": request.stop_token_ids, "input": prompt}
        for name, token_ids in given.items():
            largest = max(token_ids, default=0)
            if largest >= vocab_size:
                message = f"Invalid value for '{name}': expected token ids below {vocab_size}, got {largest}."
                raise BadInput(message, param=name)

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def __post_init__(self) -> None:
        self._threads = Threads()
        self._special_tokens = SpecialTokens(self.tokenizer.added)
        with_tools = self.template.with_tools
        self.dialect_name = self.dialect or families.recognised(with_tools.source, with_tools.takes_tools)
        self._family = families.DIALECTS[self.dialect_name]

    def models(self) -> dict[str, Object]:
        own = {"owned_by": "local", "max_model_len": self.engine.max_seq_len}
        return dict.fromkeys(self.names, own)

    def counts(self) -> dict[str, int]:
        return self.engine.counts() | {"grammars_waiting": self.grammars.turns.n_waiting}

    @property
    def alive(self) -> bool:
        return self.engine.alive

    def busy(self) -> bool:
        return self.engine.busy()

    async def close(self) -> None:
        await asyncio.to_thread(self.engine.close)
        self.grammars.close()

    def _without_calls(self, request: Request) -> Request:
        """Forbid calls, though the prompt has tools.

        To forbid the tokens that begin a call costs nothing, for no mask is computed. A parser that knows no
        tools reads lookalikes of a call as text: bare JSON (llama), and markers that are not tokens. Harmony
        has no such token, because the header of any message may name a recipient: its answers need a grammar.
        """
        added = self.tokenizer.added
        forbidden = [added[marker] for marker in self._family.call_markers if marker in added]
        logit_bias = request.sampling["logit_bias"] | dict.fromkeys(forbidden, FORBIDDEN)
        spec = request.structured_output
        if not self._family.call_markers:
            spec = spec or StructuredOutput("none")
        sampling = request.sampling | {"logit_bias": logit_bias}
        return replace(request, sampling=sampling, structured_output=spec)

    def _render_to_fit(self, request: Request) -> tuple[str, list[int]]:
        """Do as _encode(), without the oldest turns if the prompt is too long."""
        starts = turn_starts(request.messages)

        def encoded(i: int) -> tuple[str, list[int]]:
            return self._encode(request, without_old_turns(request.messages, starts[i]))

        def fits(i: int) -> bool:
            with suppress(PromptTooLong):
                return bool(encoded(i))
            return False

        with suppress(PromptTooLong):
            return encoded(0)
        # Fewer turns have fewer tokens: bisection finds the first start that fits, else the last one.
        return encoded(bisect.bisect_left(range(len(starts) - 1), True, key=fits))


def is_short(request: Request) -> bool:
    """Return whether rendering and tokenising the prompt takes less than a millisecond."""
    if request.tools or request.structured_output or request.template_kwargs:
        return False
    n_characters = 0
    for message in request.messages:
        if message.keys() != {"role", "content"}:
            return False
        n_characters += CHARACTERS_A_MESSAGE + len(message["content"])
    return n_characters <= FEW_CHARACTERS


class Answer:
    """Turns the tokens of one choice into pieces and outputs, and counts them. Used in the event loop."""

    def __init__(self, prompt: LocalPrompt) -> None:
        self.has_finished = False
        self._prompt = prompt
        self._decoder = Decoder(prompt.worker.tokenizer)
        self._parser = prompt.parser()
        self._n_logprobs_left = MAX_LOGPROBS // prompt.request.n
        self.usage = Usage(len(prompt.token_ids), 0)

    def feed(self, output: StepOutput) -> list[Output | Finish]:
        """Return the outputs that its tokens complete, and the Finish if it ends the answer."""
        said: list[Output | Finish] = []
        end = output.finish
        if output.tokens:  # without tokens (prompt, failure) cached_tokens is not set
            self.usage.cached_tokens = output.cached_tokens
        for token in output.tokens:  # one by one: a step may cross any number of channels
            if self._n_logprobs_left < 0:
                end = "length"
                break
            said += self._feed_token(token)
            if self._parser.stopped:
                end = "stop"
                break
        if end:
            said += self._parse(self._decoder.close())
            said += self._parser.close(cut=end != "stop")
            reason = "stop" if self._parser.stopped else end
            self.has_finished = True
            stop_sequence = self._parser.stop_sequence
            said.append(Finish(reason, self.usage, output.message, stop_sequence=stop_sequence))
        return said

    def _feed_token(self, token: Choice) -> list[Output]:
        said: list[Output] = []
        state_before = self._parser.state
        logprobs: tuple[TokenLogprob, ...] = ()
        if token.logprob is not None:
            logprobs = (logprob_of(token, self._prompt.worker.tokenizer),)
            self._n_logprobs_left -= 1 + len(token.top)
        self.usage.output_tokens += 1
        if token.token_id not in self._prompt.stop_token_ids:
            said = self._parse(self._decoder.feed(token.token_id, logprobs))
        if "analysis" in (state_before, self._parser.state):  # both markers count as reasoning
            self.usage.reasoning_tokens += 1
        return said

    def _parse(self, pieces: list[Piece]) -> list[Output]:
        return [*chain.from_iterable(map(self._parser.feed, pieces))]


class Workers:
    """All workers of a server: first that of this machine, if it has a model, then that of the upstreams."""

    def __init__(self, *workers: Worker | None) -> None:
        self.all = [worker for worker in workers if worker]
        self.started_at = int(time.time())

    def find(self, model: str) -> Worker:
        """Return the worker that serves a model; raises BadInput."""
        for worker in self.all:
            if worker.serves(model):
                return worker
        names = ", ".join(map(repr, (*self.models(), ALIAS)))
        message = f"The model '{model}' does not exist. This server has {names}."
        raise BadInput(message, param="model", code="model_not_found")

    async def prepare(self, request: Request, conversation: list[items.Item]) -> Prompt:
        """Make the prompt; for a compaction, a prompt that asks for a summary. Raises BadInput."""
        worker = self.find(request.model)
        if items.is_trigger(conversation[-1]):
            request = await asyncio.to_thread(items.summary_request, request, conversation, worker.defaults)
        return await worker.prepare(request)

    def spoken_name(self, model: str) -> str:
        """Return the name of a model in answers: for the alias, that of the first model."""
        return next(iter(self.models()), model) if model == ALIAS else model

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def models(self) -> dict[str, Object]:
        """Return all models by name, those of this machine first; a local model hides a remote namesake."""
        common = {"object": "model", "created": self.started_at, "owned_by": "upstream"}
        models: dict[str, Object] = {}
        for worker in self.all:
            for name, members in worker.models().items():
                models.setdefault(name, {"id": name} | common | members)
        return models

    def degraded(self) -> str:
        """Say what this machine does slowly because something failed; "" if nothing."""
        engines = [worker.engine for worker in self.all if isinstance(worker, LocalWorker)]
        return ", ".join(how for engine in engines for how in engine.degraded)

    def counts(self) -> Object:
        """Return the gauges of all workers, summed."""
        counts = Counter[str]()
        for worker in self.all:
            counts.update(worker.counts())
        return dict(counts)


# --- the fold: a plain streamed request passes what stands above --------------------------------------------

FORBIDDEN = -1e9  # a logit_bias that no logit outweighs


# --- the worker of this machine -----------------------------------------------------------------------------


class PromptTooLong(BadInput):
    """The prompt and one token of an answer exceed the model's context."""

    def __init__(self, limit: int, n: str) -> None:
        message = (
            f"This model's context is {limit} tokens, of which the answer needs at least one; "
            f"the prompt has {n}."
        )
        super().__init__(message, code="context_length_exceeded")


def logprob_of(token: Choice, tokenizer: Tokenizer) -> TokenLogprob:
    """Return the logprobs of a chosen token and of the likeliest ones, with their texts."""
    (own, *top) = [
        TokenLogprob((spelled := tokenizer.token_bytes(token_id)).decode(errors="replace"), logprob, spelled)
        for token_id, logprob in [(token.token_id, token.logprob or 0.0), *token.top]
    ]
    return own._replace(top=tuple(top))


def grammar_refused(error: BadGrammar, request: Request) -> BadInput:
    """Return the refusal of a schema or grammar that cannot be enforced."""
    tool = request.called.get(error.part)
    if tool and tool.grammar:
        why = f"Invalid {tool.grammar.syntax} grammar for '{error.part}': {error}"
        return BadInput(why, param=tool.grammar.path)
    spec = request.structured_output
    path = spec.schema_path if spec and (error.part == "schema" or not spec.tools) else "tools"
    of_part = f" for '{error.part}'" if tool else ""
    return BadInput(f"Invalid schema{of_part}: {error}", param=path, code="invalid_json_schema")
