"""What a grammar lets through, and that a model under it says what was demanded, however hot."""

import json
import random
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken

from channels import Dialect, Parser, Piece
from dialects import families
from dialects.families import DIALECTS
from dialects.json_schema import BadGrammar
from dialects.matchers import Grammars
from dialects.structured_output import Thinking, answer_grammar
from helpers.grammars import Followed, grammars_of
from helpers.laws import parse
from helpers.scripted import vocab_size
from helpers.serving import TINY, Json
from helpers.tables import table
from request import tools
from request.tools import StructuredOutput as Must
from tokenizer import Decoder, Tokenizer

TABLE = table("structured_output")
TRIP = TABLE["trip"]
FOLDER = tempfile.TemporaryDirectory()  # removed when the process ends


def closed(required: list[str], **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def strict(name: str, schema: Any) -> tools.Tool:
    return tools.Tool(name, parameters=schema, strict=True)


CITY = closed(["city"], city={"enum": ["Oslo", "Bergen"]})
FUNCTIONS = (strict("get_weather", CITY), strict("stop", {"type": "object"}))


class Model(NamedTuple):
    dialect: Dialect
    tokenizer: Tokenizer
    grammars: Grammars


@cache
def model_of(name: str, tokens: bool = True) -> Model:
    """The tiny one, without its own markers, and with those of the dialect or not."""
    content = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    own = DIALECTS["hermes"].markers
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in own]
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    row = DIALECTS[name]
    if tokens:
        library.add_special_tokens([AddedToken(m, normalized=False) for m in sorted(row.markers)])
    path = Path(FOLDER.name, f"{name}-{tokens}.json")
    library.save(str(path))
    tokenizer = Tokenizer(path)
    dialect = families.find(row, tokenizer.added, "".join(row.markers), tools=True)
    return Model(dialect, tokenizer, grammars_of(path, max(2048, vocab_size(tokenizer))))


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OBJECT = '{"city": "Oslo"}'
PATCH = tools.Tool("patch", custom=True, grammar=tools.Grammar("lark", r"""
    start: LINE+ "end"
    LINE: ("+" | "-") /.*/ LF
    %import common.LF
"""))  # fmt: skip
WHEN = tools.Tool("when", custom=True, grammar=tools.Grammar("regex", r'^[0-2][0-9]:[0-5][0-9] "\\[a-z]"$'))


def custom(name: str, input: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {tools.as_json({"input": input})}}}\n</tool_call>'


REQUIRED = Must("required", FUNCTIONS)
EDITED = Must("required", (PATCH, WHEN))
EITHER, MAYBE = EDITED._replace(tools=FUNCTIONS + EDITED.tools), EDITED._replace(calls="auto")
EDIT, TIME = custom("patch", '+print("\\n")\n-\nend'), custom("when", '23:59 "\\x"')
NO_EDIT = custom("patch", "+a\nb\nend")
FORMAT = Must("none", schema=CITY)
TREE = closed(["next"], next={"anyOf": [{"$ref": "#"}, {"type": "null"}]})


def chain(n: int) -> Json:
    """Objects, each defined in the terms of the next."""
    objects = {f"a{i}": {"properties": {"p": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(n)}
    return {"$ref": "#/$defs/a0", "$defs": {**objects, f"a{n}": {"type": "null"}}}


# What all dialects have in common is in test_every_dialect.
#  spec     the answer                 it fits
ANSWERS: list[tuple[Must, str, bool]] = [
    (REQUIRED, "\n".join([CALL] * 16), True),
    (REQUIRED, "\n".join([CALL] * 17), False),  # a small model would call until its context is full
    (REQUIRED, CALL.replace("weather", "wind"), False),
    (EITHER, TIME + "\n" + EDIT + "\n" + CALL, True),
    (EITHER, NO_EDIT, False),
    (EITHER, custom("when", '23:59 "x"'), False),
    (MAYBE, "So.\n" + EDIT, True),
    (MAYBE, "So.\n" + NO_EDIT, False),
    (Must("none", schema=TREE | {"not": {}}), '{"next": {"next": null}}', True),  # `not` is passed over
    (Must("none", schema=chain(300)), "{}", True),  # deeper ones took the process with them
]


def follow(spec: Must, model: Model, thinking: Thinking) -> Followed:
    grammar = answer_grammar(spec, model.dialect, model.tokenizer.added, thinking)
    return Followed(model.grammars, grammar.lark)


def fits(answer: str, spec: Must, model: Model, thinking: Thinking = "possible") -> bool:
    """Is every token of the answer in the mask before it, and an end after it?"""
    with follow(spec, model, thinking) as followed:
        for token_id in model.tokenizer.encode(answer):
            if not followed.mask()[token_id]:
                return False
            followed.advance(token_id)
        return bool(followed.mask()[2041])


@pytest.mark.parametrize(("spec", "answer", "expected"), ANSWERS)
def test_answers(spec: Must, answer: str, expected: bool) -> None:
    assert fits(answer, spec, model_of("hermes")) == expected


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect(name: str, tokens: bool) -> None:
    """With markers that are tokens or spelled, what is a call and what is not is the same."""
    model = model_of(name, tokens)
    forms = model.dialect.forms
    arguments = "<parameter=city>\nOslo\n</parameter>\n" if forms.arguments == "xml" else OBJECT
    one = forms.call.replace("NAME", "get_weather").replace("ARGUMENTS", arguments)
    call, thought = one.join(forms.calls), "hm {".join(forms.thought)
    several = [(one + forms.separator + one).join(forms.calls)] if forms.separator is not None else []
    text, json_text = (forms.text.replace("TEXT", said) for said in ("Fine.", OBJECT))
    before = [forms.before.replace("TEXT", "Fine.") + call] if forms.before else []
    # fmt: off
    for spec, good, bad in (
        (REQUIRED,                          [call, thought + call, *several],       [text, *before]),
        (REQUIRED._replace(one_call=True),  [call],                                 [text, *several]),
        (Must("auto", FUNCTIONS),           [call, text, thought + text, *before],  []),
        (Must("none"),                      [text, thought + text],                 [call, *before]),
        (FORMAT,                            [json_text, thought + json_text],       [call, text]),
        (Must("auto", FUNCTIONS, schema=CITY), [json_text, call],                   [text]),
    ):
    # fmt: on
        assert [answer for answer in good if not fits(answer, spec, model)] == []
        unfit = call.replace("Oslo", "Paris")
        assert [answer for answer in [*bad, unfit] if fits(answer, spec, model)] == []
    assert fits(thought.removeprefix(forms.thought[0]) + call, REQUIRED, model, "open")


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("name", DIALECTS)
def test_what_is_let_through_is_found(name: str, tokens: bool) -> None:
    """A model that takes any token of the mask, whichever it is, says what was demanded to our parser."""
    model = model_of(name, tokens)
    schemas, rng = {"get_weather": CITY, "plan": TRIP}, random.Random(1)
    functions = tuple(strict(*function) for function in schemas.items())
    for spec in 3 * (Must("required", functions), Must("auto", functions, schema=TRIP)):
        reader = Parser(model.dialect, model.dialect.start, schemas=schemas)
        found = parse(any_answer(spec, model, rng), reader)
        calls = [item for item in found if item[0] == "call"]
        assert found == calls or (spec.schema and len(found) == 1)
        for _, function, arguments in calls:
            jsonschema.validate(json.loads(arguments), schemas[function])
        for _, text in () if calls else found:
            jsonschema.validate(json.loads(text), TRIP)


def any_answer(spec: Must, model: Model, rng: random.Random) -> Iterator[Piece]:
    followed, decoder = follow(spec, model, "over"), Decoder(model.tokenizer)
    while not (mask := followed.mask())[2041]:
        token_id = int(rng.choice(np.flatnonzero(mask)))
        followed.advance(token_id)
        yield from decoder.feed(token_id)
    yield from decoder.close()


@pytest.mark.parametrize(("values", "expected"), TABLE["parameters"])
def test_parameters_in_xml(values: list[str], expected: bool) -> None:
    model = model_of("qwen3-coder")
    pairs = zip(values[::2], values[1::2], strict=True)
    written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in pairs)
    call = f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"
    spec = Must("required", (strict("f", TABLE["strings"]),))
    assert fits(call, spec, model, "over") == expected


def following(lark: str) -> Must:
    return Must("required", (tools.Tool("p", custom=True, grammar=tools.Grammar("lark", lark)),))


LARK = "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(3500)) + 'a3500: "x"'
# dialect, spec, what is to blame, words of the message
CASES: list[tuple[str, Must, str, str]] = [
    ("hermes", Must("none", schema={"type": "integer", "minimum": 10**400}), "schema", ""),
    ("hermes", Must("none", schema=chain(3000)), "", "takes more than"),
    ("hermes", Must("required", (strict("f", {"type": 5}),)), "f", ""),
    ("hermes", Must("required", (strict("f", {"not": {}, "x-guidance": {"lenient": True}}),)), "f", "not"),
    ("hermes", following(LARK), "p", ""),
    *(("hermes", following(lark), "p", message) for lark, message in TABLE["bad_larks"]),
    *(("hermes", Must("none", schema=bad, strict=True), "schema", why) for bad, why in TABLE["bad_schemas"]),
]
for schema, message in TABLE["unenforceable"]:
    CASES.append(("qwen3-coder", Must("required", (strict("f", schema),)), "f", message))


@pytest.mark.parametrize(("name", "spec", "part", "message"), CASES)
async def test_what_cannot_be_enforced_is_refused(name: str, spec: Must, part: str, message: str) -> None:
    """The first line of the library's error was all that was said of a pattern: "regex parse error:"."""
    dialect, tokenizer, grammars = model_of(name)
    with pytest.raises(BadGrammar) as caught:  # as worker.py checks a request
        await grammars.check(answer_grammar(spec, dialect, tokenizer.added, "over"), owner="")
    assert caught.value.part == part
    assert message in str(caught.value)
