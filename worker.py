"""The local worker: a checked Request to what the model says, on this machine.

    Request --prepare()--> Prompt --run()--> Accepted, Output, Output, ..., Finish

Rules of this file:
1. What can be refused is refused by prepare(), before a byte of the answer has left.
2. run() ends with exactly one Finish, unless its reader leaves first; then the engine drops the sequence.
3. Usage counts the tokens that were read from the engine: a stop token too, but nothing after a stop string.

Not here: what the pieces mean (channels.py), which tokens come (engine.py).
"""

import asyncio
import bisect
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

from channels import Accepted, Dialect, Finish, Output, Parser, Piece, State, TokenLogprob, Usage
from dialects import families
from dialects.structured_output import BadGrammar, Constraint, Grammars, Thinking, lark
from engine import Engine, Job
from request.messages import Message, shortened
from request.output_format import StructuredOutput
from request.params import Request
from request.refusals import BadInput
from request.template import ChatTemplate
from sampling import Choice, Sampling
from tokenizer import Tokenizer

ALIAS = "default"  # a name that any model answers to


class Prompt(NamedTuple):
    """A request that will be served."""

    request: Request
    token_ids: list[int]
    max_tokens: int
    seed: int
    dialect: Dialect  # families.find()
    state: State  # in which the answer begins
    after_marker: bool  # the prompt ends with one
    constraint: Constraint | None  # on the answer, where it is not free; each choice takes a copy

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)


class LocalWorker:
    """Turns requests into deltas with an engine in this process."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        grammars: Grammars,
        dialect: str | None = None,
        names: Sequence[str] = ("model",),
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """`dialect`: its name, where the template's is not to decide; `defaults` of parameters, by name."""
        self.engine = engine
        self.names = names  # of the model, in requests
        self.defaults = defaults or {}
        self._tokenizer = tokenizer
        self._template = template
        self._grammars = grammars
        self.dialect = dialect or families.recognised(template.source, template.takes_tools)

    def counts(self) -> dict[str, int]:
        return self.engine.counts()

    @property
    def alive(self) -> bool:
        return self.engine.alive

    def busy(self) -> bool:
        return self.engine.busy()

    async def close(self) -> None:
        """Fail what still runs."""
        await asyncio.to_thread(self.engine.close)

    def prepare(self, request: Request) -> Prompt:
        """Render, tokenise and check; raises BadInput."""
        self._check_token_ids(request)
        limit, whole = self.engine.max_seq_len, request.messages
        candidates = shortened(whole) if request.truncate else [whole]

        @cache
        def encoded(n_dropped: int) -> tuple[str, list[int]]:
            return self._encode(request, candidates[n_dropped])

        # Fewer turns, fewer tokens: the first that fits is found by halving.
        n_dropped = bisect.bisect_left(
            range(len(candidates) - 1), True, key=lambda n: len(encoded(n)[1]) < limit
        )
        text, token_ids = encoded(n_dropped)
        if not 0 < len(token_ids) < limit:
            expected = f"This model's context is {limit} tokens, of which the answer needs at least one"
            message = f"{expected}; the prompt has {len(token_ids)}."
            raise BadInput(message, None, "context_length_exceeded")
        if max(token_ids) >= self.engine.config.vocab_size:
            message = f"The prompt holds a token ({max(token_ids)}) that the model has no embedding for."
            raise BadInput(message, None, "invalid_prompt")
        rest = limit - len(token_ids)
        max_tokens = rest if request.max_tokens is None else min(request.max_tokens, rest)
        seed = secrets.randbits(63) if request.sampling["seed"] is None else request.sampling["seed"]
        row, added = families.DIALECTS[self.dialect], self._tokenizer.added
        dialect = families.find(row, added, self._template.source, tools=bool(request.tools))
        opening = families.opening(text, dialect)
        constraint = (
            self._constraint(request.structured_output, dialect, *opening)
            if request.structured_output
            else None
        )
        return Prompt(request, token_ids, max_tokens, seed, dialect, *opening, constraint)

    def _encode(self, request: Request, messages: list[Message]) -> tuple[str, list[int]]:
        text = self._template.render(
            messages, request.tools or None, datetime.now(), **request.template_kwargs
        )
        return text, self._tokenizer.encode(text)

    async def run(self, prompt: Prompt, choice: int = 0) -> AsyncGenerator[Accepted | Output | Finish]:
        """What the model says in one of the request's n choices."""
        yield Accepted()
        request, decoder = prompt.request, self._tokenizer.decoder()
        parser, job = self._parser(prompt), self._job(prompt, choice)
        usage = Usage(len(prompt.token_ids), 0)
        async with aclosing(self.engine.generate(job)) as steps:
            async for step in steps:
                usage = usage._replace(cached_tokens=step.cached_tokens)
                for token in step.tokens:  # one by one: a step may cross any number of channels
                    was = parser.state
                    stops = token.token_id in job.stop_token_ids
                    pieces = [] if stops else decoder.feed(token.token_id, self._logprobs(token, request))
                    for output in feed(parser, pieces):
                        yield output
                    reasoning = "analysis" in (was, parser.state)
                    usage = usage._replace(
                        output_tokens=usage.output_tokens + 1,
                        reasoning_tokens=usage.reasoning_tokens + reasoning,
                    )
                    if parser.stopped:
                        yield Finish("stop", usage)
                        return
                if step.finish:
                    for output in [*feed(parser, decoder.close()), *parser.close(cut=step.finish != "stop")]:
                        yield output
                    reason = "stop" if parser.stopped else step.finish
                    yield Finish(reason, usage, step.message)

    def _parser(self, prompt: Prompt) -> Parser:
        request = prompt.request
        functions = [tool["function"] for tool in request.tools]
        return Parser(
            prompt.dialect,
            state=prompt.state,
            after_marker=prompt.after_marker,
            stop=request.stop,
            one_call=not request.parallel_tool_calls,
            schemas={function["name"]: function.get("parameters", {}) for function in functions},
        )

    def _job(self, prompt: Prompt, choice: int) -> Job:
        request = prompt.request
        given = {"seed": prompt.seed, "choice": choice, "n_top_logprobs": request.n_top_logprobs}
        # What is demanded has an end of its own, behind which nothing may come.
        goes_on = request.ignore_eos and not prompt.constraint
        ends = () if goes_on else self.engine.config.eos_token_ids
        stops = frozenset((*ends, *request.stop_token_ids))
        constraint = prompt.constraint.copy() if prompt.constraint else None
        return Job(
            prompt.token_ids, prompt.max_tokens, stops, Sampling(**request.sampling | given), constraint
        )

    def _constraint(
        self, spec: StructuredOutput, dialect: Dialect, state: State, after_marker: bool
    ) -> Constraint:
        """What the answer must keep to; raises BadInput where it cannot be enforced."""
        thinking: Thinking = "open" if state == "analysis" else "over" if after_marker else "possible"
        try:
            self._grammars.check(spec)
            return self._grammars.constraint(lark(spec, dialect, self._tokenizer.added, thinking))
        except BadGrammar as error:
            if wanted := dict(spec.inputs).get(error.part):
                message = f"Invalid {wanted.syntax} grammar for '{error.part}': {error}"
                raise BadInput(message, wanted.path) from error
            path = spec.schema_path if error.part == "schema" else "tools"
            message = f"Invalid schema for '{error.part}': {error}"
            raise BadInput(message, path, "invalid_json_schema") from error

    def _check_token_ids(self, request: Request) -> None:
        n = self.engine.config.vocab_size
        named = {"logit_bias": request.sampling["logit_bias"], "stop_token_ids": request.stop_token_ids}
        for name, ids in named.items():
            if any(token_id >= n for token_id in ids):
                message = f"Invalid value for '{name}': expected token ids below {n}, got {max(ids)}."
                raise BadInput(message, name, "invalid_value")

    def _logprobs(self, token: Choice, request: Request) -> tuple[TokenLogprob, ...]:
        if token.logprob is None:
            return ()
        top = tuple(self._named(token_id, logprob) for token_id, logprob in token.top)
        return (self._named(token.token_id, token.logprob)._replace(top=top),)

    def _named(self, token_id: int, logprob: float) -> TokenLogprob:
        spelled = self._tokenizer.token_bytes(token_id)
        return TokenLogprob(spelled.decode(errors="replace"), logprob, spelled)


def feed(parser: Parser, pieces: list[Piece]) -> list[Output]:
    return [output for piece in pieces for output in parser.feed(piece)]
