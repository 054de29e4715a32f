"""What streams are made of: the members of events, items, parts and chunks, and which event may follow which.

    JSON object --Typed()--> the same object without members of a wrong type, which reads without asking
                             .faults: a line for each member that is missing, or has a wrong type
    event --label()--> its name in GRAMMAR        (state, label) --ORDER--> the next state

Authority: https://github.com/openai/openai-openapi, the types of its schemas and what they call "required";
https://platform.openai.com/docs/api-reference/responses-streaming for the order.

Rules of this file:
1. One row says it all about one kind of object: `name` is a string, `name:type` something else, [type] a
   list of such objects, `name:=a|b` one of these values. A name that ends with "?" may be absent, as in
   TypeScript; every other one must be there. Members that stand in no row are not looked at.
2. An item whose `type` is message has the members of "item" and those of "item message". One name has one
   type in all items, in all parts and in all events: it can be read before the type of the object is known.
3. The tables are the judge's own: nothing is imported from a server that is judged.
4. What a server runs itself (web search, code, MCP) is one state, "hosted": its events are its own.

Not here: what the members must say (events.py, chunks.py).
"""

import json
import re
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]
Members = dict[str, str]  # name -> type, a key of BASIC or of MEMBERS; with a "?" if it may be absent
Faults = Iterator[tuple[int, str]]  # (number of an event, what is wrong with it)

BASIC: dict[str, list[type]] = {
    "": [str],
    "null": [str, type(None)],
    "int": [int],
    "list": [list],
    "dict": [dict],
}

OBJECTS = """
usage                 = input_tokens?:int output_tokens?:int total_tokens?:int
                        prompt_tokens?:int completion_tokens?:int
                        input_tokens_details?:usage output_tokens_details?:usage
                        prompt_tokens_details?:usage completion_tokens_details?:usage
                        cached_tokens?:int reasoning_tokens?:int
error                 = message:any type:any param:any code:any
refusal               = message type param:null code:null
refused_turn          = type:any status:int error:turn_error
turn_error            = message code:any
steer_failed          = type:=response.steer.failed error:unknown_response steer:given_back
unknown_response      = code:=response_not_found
given_back            = previous_response_id:=resp_00000000000000000000000000000000 input:=Stop!

custom_call           = type:=custom_tool_call name:=get_weather input
travel_call           = namespace:=travel name:=get_weather
coloured              = colour:=red|green n:int

models                = object:=list data:[model]
model                 = id object:=model

input_items           = object:=list data:[input_item]
input_item            = id content?:[input_part]
input_part            = type
input_part output_text = annotations:list

part                  = type
part output_text      = text annotations:list logprobs:list
part refusal          = refusal
part reasoning_text   = text
part summary_text     = text

item                  = type
item message          = id status role content:[part]
item reasoning        = id status? summary:[part] content?:[part]
item function_call    = id status call_id name arguments
item custom_tool_call = id status? call_id name input
item compaction       = id encrypted_content

response              = id object:any created_at:any status error:any incomplete_details:any
                        instructions:any model:any tools:any output:[item] usage?:usage
                        tool_choice:any parallel_tool_calls:any metadata:any
                        temperature:any top_p:any

event                 = type? sequence_number?:int
event response.created                       = response:response
event response.queued                        = response:response
event response.in_progress                   = response:response
event response.completed                     = response:response
event response.incomplete                    = response:response
event response.failed                        = response:response
event response.output_item.added             = output_index:int item:item
event response.output_item.done              = output_index:int item:item
event response.content_part.added            = item_id output_index:int content_index:int part:part
event response.content_part.done             = item_id output_index:int content_index:int part:part
event response.output_text.delta             = item_id output_index:int content_index:int delta logprobs:list
event response.output_text.done              = item_id output_index:int content_index:int text logprobs:list
event response.output_text.annotation.added  = item_id output_index:int content_index:int
                                               annotation_index:int annotation:any
event response.refusal.delta                 = item_id output_index:int content_index:int delta
event response.refusal.done                  = item_id output_index:int content_index:int refusal
event response.reasoning_text.delta          = item_id output_index:int content_index:int delta
event response.reasoning_text.done           = item_id output_index:int content_index:int text
event response.reasoning.delta               = item_id output_index:int content_index:int delta
event response.reasoning.done                = item_id output_index:int content_index:int text
event response.reasoning_summary_part.added  = item_id output_index:int summary_index:int part:part
event response.reasoning_summary_part.done   = item_id output_index:int summary_index:int part:part
event response.reasoning_summary_text.delta  = item_id output_index:int summary_index:int delta
event response.reasoning_summary_text.done   = item_id output_index:int summary_index:int text
event response.function_call_arguments.delta = item_id output_index:int delta
event response.function_call_arguments.done  = item_id output_index:int arguments name?
event response.custom_tool_call_input.delta  = item_id output_index:int delta
event response.custom_tool_call_input.done   = item_id output_index:int input
event response.compaction.compacting         = item_id output_index:int
event response.steer.accepted                = steer:any
event response.steer.pending                 = steer:any reason required_input:list
event response.steer.failed                  = steer:any error:any
event error                                  = code:any message:any param:any

chunk                 = id object:=chat.completion.chunk created:int model
                        choices:[choice] usage?:usage error?:any
choice                = index:int delta:delta finish_reason:null message?:delta logprobs?:chat_logprobs
chat_logprobs         = content?:list
delta                 = role?:null content?:null tool_calls?:[call]
call                  = index?:int id?:null type?:null function?:called custom?:called
called                = name?:null arguments?:null input?:null

announced                     = status:=in_progress content:=[] summary:=[]
                                text:= refusal:= arguments:= input:=
unfinished                    = output:=[] usage:=null

told response.created         = status:=in_progress
told in the background        = status:=queued|in_progress
told response.queued          = status:=queued
told response.in_progress     = status:=in_progress
told response.completed       = status:=completed
told response.incomplete      = status:=incomplete
told response.failed          = status:=failed|cancelled

status queued                 = error:=null incomplete_details:=null completed_at:=null
status in_progress            = error:=null incomplete_details:=null completed_at:=null
status completed              = error:=null incomplete_details:=null
status incomplete             = error:=null incomplete_details:dict  completed_at:=null
status failed                 = error:dict  incomplete_details:=null completed_at:=null
status cancelled              = error:=null incomplete_details:=null completed_at:=null
"""
ROWS: dict[str, dict[str, Members]] = {}  # kind -> type -> its row; "*": the row of all objects of the kind
MEMBERS: dict[str, Members] = {}  # kind -> what its objects may have, without the "?" of the names
for _kind, _type, _row in re.findall(r"(\w+) *(.*?) *= (.*)", re.sub("\n +", " ", OBJECTS)):
    _members = dict(member.partition(":")[::2] for member in _row.split())
    ROWS.setdefault(_kind, {})[_type or "*"] = _members
    MEMBERS.setdefault(_kind, {}).update((name.removesuffix("?"), type_) for name, type_ in _members.items())
EVENTS = ROWS["event"]


# --- which event may follow which ---------------------------------------------------------------------------

# Columns: state; event, and the item or part that it opens or ends; next state
ORDERED = """
start           response.created                                          created
created         response.queued                                           queued
created         response.in_progress                                      between
queued          response.in_progress                                      between

between         response.output_item.added message                        message
message         response.content_part.added output_text                   text
text            response.output_text.delta                                text
text            response.output_text.done                                 text done
text done       response.content_part.done output_text                    message done
message         response.content_part.added refusal                       refusal
refusal         response.refusal.delta                                    refusal
refusal         response.refusal.done                                     refusal done
refusal done    response.content_part.done refusal                        message done
message done    response.output_item.done message                         between

between         response.output_item.added reasoning                      reasoning
reasoning       response.content_part.added reasoning_text                thought
thought         response.reasoning_text.delta                             thought
thought         response.reasoning_text.done                              thought done
thought         response.reasoning.delta                                  thought
thought         response.reasoning.done                                   thought done
thought done    response.content_part.done reasoning_text                 reasoning done
reasoning done  response.output_item.done reasoning                       between

between         response.output_item.added function_call                  call
call            response.function_call_arguments.delta                    call
call            response.function_call_arguments.done                     call done
call done       response.output_item.done function_call                   between

between         response.output_item.added custom_tool_call               custom
custom          response.custom_tool_call_input.delta                     custom
custom          response.custom_tool_call_input.done                      custom done
custom done     response.output_item.done custom_tool_call                between

between         response.output_item.added compaction                     compaction
compaction      response.output_item.done compaction                      between

between         response.completed                                        end
between         response.incomplete                                       end
between         response.failed                                           end
queued          response.failed                                           end

message done    response.content_part.added output_text                   text
text            response.output_text.annotation.added                     text
message done    response.content_part.added refusal                       refusal

reasoning done  response.content_part.added reasoning_text                thought
reasoning       response.output_item.done reasoning                       between
reasoning       response.reasoning_summary_part.added summary_text        summary
reasoning done  response.reasoning_summary_part.added summary_text        summary
summary         response.reasoning_summary_text.delta                     summary
summary         response.reasoning_summary_text.done                      summary done
summary done    response.reasoning_summary_part.done summary_text         reasoning done

compaction      response.compaction.compacting                            compaction

between         response.output_item.added *                              hosted
hosted          response.*                                                hosted
hosted          response.output_item.done *                               between
"""
GRAMMAR = {
    (state, event): then
    for state, event, then in re.findall(r"^(\S.*?)  +(.*?)  +(.*)$", ORDERED, re.MULTILINE)
}
HOSTED = re.compile(
    "(web_search|file_search|code_interpreter|image_generation|computer|(local_)?shell|apply_patch)_call|mcp_|tool_search"
)

# A failure may leave open whatever is open.
ORDER = GRAMMAR | {(state, "response.failed"): "end" for state in {*GRAMMAR.values()} - {"end"}}
# The state after an event that came out of order.
AFTER = {event: state for (_, event), state in ORDER.items()}


def label(event: "Typed") -> str:
    """Name an event as GRAMMAR does: its type, and the type of the item or part that it opens or ends."""
    event_type: str = event.type
    if HOSTED.match(event_type.removeprefix("response.")):
        return "response.*"
    inner = event.item or event.part
    if not inner:
        return event_type
    is_hosted = event_type.startswith("response.output_item.") and HOSTED.match(inner.type)
    return f"{event_type} {'*' if is_hosted else inner.type}"


# --- objects against their table ----------------------------------------------------------------------------

EMPTY: list[Any] = [None, "", [], {}]  # what an absent member reads as: the first that has its type
WRONG = object()  # in place of a value of another type


class Typed(dict[str, Any]):
    """An object without members of another type than its table says, at any depth.

    Members are attributes too. An absent one reads as what is empty: "", [], {} or None.
    `faults` has a line for each member that the object, or one in it, lacks or has of another type.
    """

    def __init__(self, value: Json, kind: str) -> None:
        super().__init__()
        self.types = MEMBERS[kind]
        what = value.get("type") or f"the {kind}"
        row = ROWS[kind]["*"] | ROWS[kind].get(str(what), {})
        self.faults = [f"{what} lacks {name}" for name in required(row) if name not in value]
        for name, member in value.items():
            fitted = fit(member, self.types.get(name, "any"))
            if fitted is not WRONG:
                self[name] = fitted
                for inner in fitted if isinstance(member, list) else [fitted]:
                    self.faults += getattr(inner, "faults", [])
            elif name in row:
                self.faults.append(f"{what} has {name} of another type: {shortened(json.dumps(member))}")

    def __missing__(self, name: str) -> Any:
        fitted = [fit(empty, self.types.get(name, "any")) for empty in EMPTY]
        return next((value for value in fitted if value is not WRONG), None)

    def __getattr__(self, name: str) -> Any:
        return self[name]


def object_in(value: Json, name: str) -> Json:
    """Return the object that a member is; {} for anything else."""
    member = value.get(name)
    return member if isinstance(member, dict) else {}


def expect_members(value: Json, kind: str) -> None:
    """Expect an object to be as its table says; raises AssertionError."""
    faults = Typed(value, kind).faults
    assert not faults, faults


def fit(value: Any, type_: str) -> Any:
    """Return the value if it has the type, else WRONG; objects without their members of a wrong type."""
    if type_ in MEMBERS and isinstance(value, dict):
        return Typed(value, type_)
    if type_.startswith("[") and isinstance(value, list):
        return [Typed(entry, type_[1:-1]) for entry in value if isinstance(entry, dict)]
    text = value if isinstance(value, str) else json.dumps(value)
    is_named = type_.startswith("=") and text in type_[1:].split("|")
    is_it = is_named or type_ == "any" or type(value) in BASIC.get(type_, [])
    return value if is_it else WRONG


def unfit(value: Json, row: Members) -> list[str]:
    """Return a line for each member that the object has and that is not as the row says."""
    return [
        f"expected {name} {type_.strip('=') or 'empty'}, got {value[name]}"
        for name, type_ in row.items()
        if name in value and fit(value[name], type_) is WRONG
    ]


def required(members: Members) -> list[str]:
    return [name for name in members if not name.endswith("?")]


def without(value: Any, *names: str) -> Any:
    """Leave out the members of these names, and those that are null: null and absent mean the same."""
    if isinstance(value, list):
        return [without(entry, *names) for entry in value]
    if isinstance(value, dict):
        return {
            name: without(inner, *names)
            for name, inner in value.items()
            if name not in names and inner is not None
        }
    return value


# --- text ---------------------------------------------------------------------------------------------------


def shortened(text: str, length: int = 80) -> str:
    if len(text) <= length:
        return text
    return f"{text[: length // 2]}...{text[-length // 2 :]}"


def printable(text: str) -> str:
    """Write out what a terminal would obey, and what XML cannot say."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
