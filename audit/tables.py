"""What the API's objects are made of, and which event may follow which: two tables, to be read and checked.

Authority: https://github.com/openai/openai-openapi and the types that openai-python 3.57 makes of it, which
say what is required; https://platform.openai.com/docs/api-reference/responses-streaming for the order. What
OpenAI's and Azure's recorded streams do against their types is allowed: their comments say so.

Why strings and not classes: a row can be held against the reference with the eye, and a test holds all of
them against the SDK's types. The tables are the judge's own: nothing of a judged server is imported.

Not here: who reads them (schema.py), what the members must say (events.py, chunks.py).
"""

# Columns: type; Python's name for its values
VALUES = """
text            str
id              str
int             int
num             int float
time            int float
bool            bool
null            NoneType
list            list
dict            dict
"""

# A row is a kind of object, a value of its `type` or nothing, and its members as name:type. The row without a
# type holds for all objects of the kind, and has what rules read before they know the type. A name that ends
# with "?" may be absent or null. Members that stand in no row are not looked at. A type is one of VALUES, a
# kind, [type] for a list, +kind for a list with such an object, =word for this very value, any, or several of
# these with "|" between them; a member without one is a text. A text of the type id is not empty, and a time
# has passed, in seconds since 1970.
OBJECTS = """
usage                 = input_tokens?:int output_tokens?:int total_tokens?:int
                        prompt_tokens?:int completion_tokens?:int
                        input_tokens_details?:usage output_tokens_details?:usage
                        prompt_tokens_details?:usage completion_tokens_details?:usage
                        cache_read_input_tokens?:int cached_tokens?:int reasoning_tokens?:int
                        cache_write_tokens?:int
                        accepted_prediction_tokens?:int rejected_prediction_tokens?:int
                        audio_tokens?:int image_tokens?:int text_tokens?:int
error                 = message type:any param:any code:any
refusal               = message type:text param:text|null code:text|null
refused_turn          = type:any status:int error:turn_error
turn_error            = message code:any
steer_failed          = type:=response.steer.failed error:unknown_response steer:given_back
unknown_response      = code:=response_not_found
given_back            = previous_response_id:=resp_00000000000000000000000000000000 input:=Stop!

custom_call           = type:=custom_tool_call name:=get_weather input
time_call             = type:=function_call name:=get_time
travel_call           = namespace:=travel name:=get_weather
coloured              = colour:=red|=green n:int

get_weather           = name:=get_weather
a_is_b                = a:=b
noted                 = user:=u-1 note:=caf\u00e9
four_tokens           = completion_tokens:=1|=2|=3|=4
low_effort            = effort?:=low
item_one              = content:+text_one
text_one              = text:=one
item_three            = content:+text_three
text_three            = text:=three
message               = type:=message role:=assistant id:id model content:list usage:dict
                        stop_reason:text|null stop_sequence:text|null
tool_use              = type:=tool_use id:id name:id input:dict
not_a_call            = type:=text|=thinking
message_error         = type message
not_found             = type:=not_found_error

models                = object:=list data:[model]
model                 = id:id object:=model

input_items           = object:=list data:[input_item]
input_item            = id:id content?:[input_part]
input_part            = type:id
input_part output_text = annotations:list

event_token           = token logprob:num bytes?:[int] top_logprobs?:[event_top_token]
event_top_token       = token? logprob?:num bytes?:[int]
part_token            = token logprob:num bytes:[int] top_logprobs:[part_top_token]
part_top_token        = token logprob:num bytes:[int]
chat_token            = token logprob:num bytes?:[int] top_logprobs:[chat_top_token]
chat_top_token        = token logprob:num bytes?:[int]

annotation            = type:id
annotation file_citation           = file_id:id filename index:int
annotation url_citation            = start_index:int end_index:int title url
annotation container_file_citation = container_id:id file_id:id filename start_index:int end_index:int
annotation file_path               = file_id:id index:int

part                  = type:id text? refusal? annotations?:[annotation] logprobs?:[part_token]
part output_text      = text annotations:[annotation] logprobs:[part_token]
part refusal          = refusal
part reasoning_text   = text
part summary_text     = text

caller                = type:=direct|=program
caller program        = caller_id:id
printed               = stdout? stderr?
output                = stdout stderr outcome:outcome
outcome               = type:=timeout|=exit
outcome exit          = exit_code:int
patch                 = type:=create_file|=update_file|=delete_file path:id
patch create_file     = diff
patch update_file     = diff
search                = type:id query?:text|null queries?:[text] url?:text|null sources?:list
search find_in_page   = pattern url
commands              = commands:[text]
command               = type:=exec command:[text] env:dict
screen                = type:=computer_screenshot
check                 = id:id
act                   = type:id
act click             = button:=left|=right|=wheel|=back|=forward x:int y:int
act double_click      = x:int y:int
act drag              = path:[point]
act keypress          = keys:[text]
act move              = x:int y:int
act scroll            = x:int y:int scroll_x:int scroll_y:int
act type              = text
point                 = x:int y:int
mcp_tool              = name:id input_schema:any
mcp_error             = type:=mcp_protocol_error|=mcp_tool_execution_error|=http_error
mcp_error mcp_protocol_error = code:int message
mcp_error http_error  = code:int message
mcp_error mcp_tool_execution_error = content:any
interpreted           = type:=logs|=image
interpreted logs      = logs
interpreted image     = url

item                  = type:id id?:id status? role? call_id?:id|null name? arguments?:any input?
                        content?:[part] summary?:[part] caller?:caller namespace?
item message          = id:id status:=in_progress|=completed|=incomplete role:=assistant content:[part]
                        phase?:=commentary|=final_answer
item reasoning        = id:id status?:=in_progress|=completed|=incomplete summary:[part] content?:[part]
                        encrypted_content?
item function_call    = id:id status?:=in_progress|=completed|=incomplete call_id:id name:id arguments:text
                        namespace?
item custom_tool_call = id:id status? call_id:id name:id input namespace?
item compaction       = id:id encrypted_content
item web_search_call  = id:id status:=in_progress|=searching|=completed|=incomplete|=failed action?:search
item file_search_call = id:id status:=in_progress|=searching|=completed|=incomplete|=failed queries:[text]
                        results?:[dict]
item code_interpreter_call = id:id status:=in_progress|=interpreting|=completed|=incomplete|=failed
                        container_id:id code?:text outputs?:[interpreted]
item image_generation_call = id:id status:=in_progress|=generating|=completed|=failed result?
item mcp_list_tools   = id:id server_label:id tools:[mcp_tool] error?
item mcp_call         = id:id status?:=in_progress|=calling|=completed|=incomplete|=failed
                        server_label:id name:id arguments:text output? error?:mcp_error|text
item mcp_approval_request  = id:id server_label:id name:id arguments:text
item mcp_approval_response = id:id approval_request_id:id approve:bool
item tool_search_call = id:id status:=in_progress|=completed|=incomplete execution:=server|=client
                        arguments:dict|list|text
item tool_search_output = id:id status:=in_progress|=completed|=incomplete execution:=server|=client
                        tools:[tool]
item program          = id:id call_id:id code fingerprint
item program_output   = id:id call_id:id result status:=in_progress|=completed|=incomplete
item local_shell_call = id:id status:=in_progress|=completed|=incomplete call_id:id action:command
item local_shell_call_output = id:id status?:=in_progress|=completed|=incomplete output
item shell_call       = id:id status:=in_progress|=completed|=incomplete call_id:id action:commands
item shell_call_output = id:id status:=in_progress|=completed|=incomplete call_id:id output:[output]
item apply_patch_call = id:id status:=in_progress|=completed call_id:id operation:patch
item apply_patch_call_output = id:id status:=completed|=failed call_id:id output?
item computer_call    = id:id status:=in_progress|=completed|=incomplete call_id:id action?:act actions?:[act]
                        pending_safety_checks:[check]
item computer_call_output  = id:id status:=in_progress|=completed|=incomplete|=failed call_id:id output:screen
item function_call_output  = id:id status:=in_progress|=completed|=incomplete output:text|list
item custom_tool_call_output = id:id status:=in_progress|=completed|=incomplete call_id:id output:text|list
item additional_tools = id:id tools:[tool] role:=unknown|=user|=assistant|=system|=critic|=discriminator\
|=developer|=tool

tool                  = type:=function|=custom|=namespace|=mcp|=tool_search|=apply_patch|=shell|=local_shell\
|=computer|=computer_use_preview|=code_interpreter|=programmatic_tool_calling|=file_search|=image_generation\
|=web_search|=web_search_2025_08_26|=web_search_preview|=web_search_preview_2025_03_11
tool function         = name:id description?:text parameters?:dict strict?:bool defer_loading?:bool
tool custom           = name:id description?:text format?:format
tool namespace        = name:id description tools:[tool]
tool file_search      = vector_store_ids:[text]
tool mcp              = server_label:id
tool code_interpreter = container:text|dict
tool computer_use_preview = display_height:int display_width:int
                        environment:=windows|=mac|=linux|=ubuntu|=browser

choice_of_tool        = type:id
choice_of_tool function      = name:id
choice_of_tool custom        = name:id
choice_of_tool mcp           = server_label:id
choice_of_tool allowed_tools = mode:=auto|=required tools:[dict]

response              = id:id object:=response created_at:time model:id output:[item] usage?:usage
                        status:=queued|=in_progress|=completed|=incomplete|=failed|=cancelled
                        error:failure|null incomplete_details:incomplete|null completed_at?:time
                        instructions:text|list|null metadata:dict|null parallel_tool_calls:bool
                        temperature:num|null top_p:num|null tools:[tool]
                        tool_choice:=none|=auto|=required|choice_of_tool
                        background?:bool conversation?:conversation max_output_tokens?:int
                        max_tool_calls?:int previous_response_id?:id prompt_cache_key?:text
                        reasoning?:reasoning safety_identifier?:text service_tier?:text store?:bool
                        text?:format_of_text top_logprobs?:int truncation?:=auto|=disabled user?:text
                        presence_penalty?:num frequency_penalty?:num moderation?:dict
                        prompt_cache_retention?:text tool_usage?:tool_usage
tool_usage            = image_gen:images_usage web_search:searches
images_usage          = input_tokens:int input_tokens_details:images_tokens output_tokens:int total_tokens:int
                        output_tokens_details?:images_tokens
images_tokens         = image_tokens:int text_tokens:int
searches              = num_requests:int
failure               = code:id message
incomplete            = reason?:text
conversation          = id:id
reasoning             = effort?:text summary?:text
format_of_text        = format?:format verbosity?:text
format                = type:id
format json_schema    = name:id schema:dict
format grammar        = definition syntax:=lark|=regex

event                 = type?:id sequence_number?:int response?:response item?:item part?:part item_id?:text
                        output_index?:int content_index?:int summary_index?:int annotation_index?:int
                        command_index?:int output?:[output] delta? text? refusal? arguments? input?
                        name? logprobs?:[event_token] obfuscation?
event keepalive                              = sequence_number?:int
event error                                  = code:text|null message:text param:text|null
event response.created                       = response:response
event response.queued                        = response:response
event response.in_progress                   = response:response
event response.completed                     = response:response
event response.incomplete                    = response:response
event response.failed                        = response:response
event response.output_item.added             = output_index:int item:item
event response.output_item.done              = output_index:int item:item
event response.content_part.added            = item_id:id output_index:int content_index:int part:part
event response.content_part.done             = item_id:id output_index:int content_index:int part:part
event response.output_text.delta             = item_id:id output_index:int content_index:int delta
                                               logprobs:[event_token]
event response.output_text.done              = item_id:id output_index:int content_index:int text
                                               logprobs:[event_token]
event response.output_text.annotation.added  = item_id:id output_index:int content_index:int
                                               annotation_index:int annotation:annotation
event response.refusal.delta                 = item_id:id output_index:int content_index:int delta
event response.refusal.done                  = item_id:id output_index:int content_index:int refusal
event response.reasoning_text.delta          = item_id:id output_index:int content_index:int delta
event response.reasoning_text.done           = item_id:id output_index:int content_index:int text
event response.reasoning.delta               = item_id:id output_index:int content_index:int delta
event response.reasoning.done                = item_id:id output_index:int content_index:int text
event response.reasoning_summary_part.added  = item_id:id output_index:int summary_index:int part:part
event response.reasoning_summary_part.done   = item_id:id output_index:int summary_index:int part:part
event response.reasoning_summary_text.delta  = item_id:id output_index:int summary_index:int delta
event response.reasoning_summary_text.done   = item_id:id output_index:int summary_index:int text
event response.function_call_arguments.delta = item_id:id output_index:int delta
event response.function_call_arguments.done  = item_id:id output_index:int arguments name?:id
event response.custom_tool_call_input.delta  = item_id:id output_index:int delta
event response.custom_tool_call_input.done   = item_id:id output_index:int input
event response.compaction.compacting         = item_id:id output_index:int
event response.web_search_call.in_progress   = item_id:id output_index:int
event response.web_search_call.searching     = item_id:id output_index:int
event response.web_search_call.completed     = item_id:id output_index:int
event response.file_search_call.in_progress  = item_id:id output_index:int
event response.file_search_call.searching    = item_id:id output_index:int
event response.file_search_call.completed    = item_id:id output_index:int
event response.code_interpreter_call.in_progress  = item_id:id output_index:int
event response.code_interpreter_call_code.delta   = item_id:id output_index:int delta
event response.code_interpreter_call_code.done    = item_id:id output_index:int code
event response.code_interpreter_call.interpreting = item_id:id output_index:int
event response.code_interpreter_call.completed    = item_id:id output_index:int
event response.image_generation_call.in_progress  = item_id:id output_index:int
event response.image_generation_call.generating   = item_id:id output_index:int
event response.image_generation_call.partial_image = item_id:id output_index:int partial_image_index:int
                                                     partial_image_b64 size? quality? background?
                                                     output_format?
event response.image_generation_call.completed    = item_id:id output_index:int
event response.mcp_list_tools.in_progress    = item_id:id output_index:int
event response.mcp_list_tools.completed      = item_id:id output_index:int
event response.mcp_list_tools.failed         = item_id:id output_index:int
event response.mcp_call.in_progress          = item_id:id output_index:int
event response.mcp_call_arguments.delta      = item_id:id output_index:int delta
event response.mcp_call_arguments.done       = item_id:id output_index:int arguments
event response.mcp_call.completed            = item_id:id output_index:int
event response.mcp_call.failed               = item_id:id output_index:int
event response.shell_call_command.added      = output_index:int command_index:int command
event response.shell_call_command.delta      = output_index:int command_index:int delta
event response.shell_call_command.done       = output_index:int command_index:int command
event response.shell_call_output_content.delta = item_id:id output_index:int command_index:int delta:printed
event response.shell_call_output_content.done  = item_id:id output_index:int command_index:int output:[output]
event response.apply_patch_call_operation_diff.delta = item_id:id output_index:int delta
event response.apply_patch_call_operation_diff.done  = item_id:id output_index:int diff
event response.audio.delta                   = delta
event response.audio.done                    = sequence_number?:int
event response.audio.transcript.delta        = delta
event response.audio.transcript.done         = sequence_number?:int
event response.steer.accepted                = steer:any
event response.steer.pending                 = steer:any reason required_input:list
event response.steer.failed                  = steer:any error:any

chunk                 = id:id object:=chat.completion.chunk created:time model
                        choices:[choice] usage?:usage error?:any service_tier?:text
                        system_fingerprint?:text obfuscation?:text moderation?:dict
choice                = index:int delta:delta finish_reason:text|null message?:delta
                        logprobs?:chat_logprobs
chat_logprobs         = content?:[chat_token] refusal?:[chat_token]
delta                 = role?:text|null content?:text|null refusal?:text|null tool_calls?:[call]
call                  = index?:int id?:text|null type?:=function|=custom|null
                        function?:called custom?:called
called                = name?:text|null arguments?:text|null input?:text|null

written               = message reasoning function_call custom_tool_call
begins                = content_index:_part.added summary_index:_part.added command_index:_command.added
                        partial_image_index:.partial_image
summed                = text refusal arguments input code command diff
sealed                = encrypted_content fingerprint
changing              = status output usage error incomplete_details completed_at service_tier store
                        tool_usage moderation content_filters

announced             = status:=in_progress content:=[] summary:=[] text:= refusal:= arguments:= input:=
                        code:= command:=
announced mcp_approval_request = arguments:any
announced tool_search_call     = status:=in_progress arguments:any
announced shell_call_output    = status:=in_progress|=completed
announced program_output       = status:=in_progress|=completed|=incomplete
announced computer_call_output = status:any
announced function_call_output = status:any
announced custom_tool_call_output = status:any
announced local_shell_call_output = status:any
announced apply_patch_call_output = status:any
unfinished                     = output:=[] usage:=null

told response.created         = status:=in_progress
told in the background        = status:=queued|=in_progress
told response.queued          = status:=queued
told response.in_progress     = status:=in_progress
told response.completed       = status:=completed
told response.incomplete      = status:=incomplete
told response.failed          = status:=failed|=cancelled

status queued                 = error:=null incomplete_details:=null completed_at:=null
status in_progress            = error:=null incomplete_details:=null completed_at:=null
status completed              = error:=null incomplete_details:=null
status incomplete             = error:=null incomplete_details:incomplete completed_at:=null
status failed                 = error:failure incomplete_details:=null completed_at:=null
status cancelled              = error:=null incomplete_details:=null completed_at:=null
"""

# Columns: state; event, and the item or part that it opens or ends; next state. In the state "open" is a
# response that has begun, whatever of it is open: OpenAI's streams tell of an error before they fail.
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
open            response.failed                                           end
open            error                                                     failed

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

between         response.audio.delta                                      between
between         response.audio.done                                       between
between         response.audio.transcript.delta                           between
between         response.audio.transcript.done                            between

between         response.output_item.added apply_patch_call               patch
patch           response.output_item.done apply_patch_call                between
patch           response.apply_patch_call_operation_diff.delta            diff
patch           response.apply_patch_call_operation_diff.done             diff done
diff            response.apply_patch_call_operation_diff.delta            diff
diff            response.apply_patch_call_operation_diff.done             diff done
diff done       response.output_item.done apply_patch_call                between

between         response.output_item.added shell_call                     shell
shell           response.shell_call_command.added                         command
command         response.shell_call_command.delta                         command
command         response.shell_call_command.done                          shell
shell           response.output_item.done shell_call                      between
between         response.output_item.added shell_call_output              shell output
shell output    response.shell_call_output_content.delta                  shell output
shell output    response.shell_call_output_content.done                   shell output
shell output    response.output_item.done shell_call_output               between

between         response.output_item.added additional_tools               more tools
more tools      response.output_item.done additional_tools                between
between         response.output_item.added apply_patch_call_output        patch output
patch output    response.output_item.done apply_patch_call_output         between
between         response.output_item.added computer_call                  computer
computer        response.output_item.done computer_call                   between
between         response.output_item.added computer_call_output           screen
screen          response.output_item.done computer_call_output            between
between         response.output_item.added custom_tool_call_output        custom output
custom output   response.output_item.done custom_tool_call_output         between
between         response.output_item.added function_call_output           call output
call output     response.output_item.done function_call_output            between
between         response.output_item.added local_shell_call               local shell
local shell     response.output_item.done local_shell_call                between
between         response.output_item.added local_shell_call_output        local output
local output    response.output_item.done local_shell_call_output         between
between         response.output_item.added mcp_approval_request           approval asked
approval asked  response.output_item.done mcp_approval_request            between
between         response.output_item.added mcp_approval_response          approval given
approval given  response.output_item.done mcp_approval_response           between
between         response.output_item.added program                        program
program         response.output_item.done program                         between
between         response.output_item.added program_output                 program output
program output  response.output_item.done program_output                  between
between         response.output_item.added tool_search_call               tool search
tool search     response.output_item.done tool_search_call                between
between         response.output_item.added tool_search_output             tools found
tools found     response.output_item.done tool_search_output              between
"""

# Items of hosted tools, which the server runs itself: several may be open side by side. In the state "beside"
# one is, and the event is not its own.
HOSTED = """
between         response.output_item.added web_search_call                web
web             response.web_search_call.in_progress                      web begun
web begun       response.web_search_call.searching                        web searching
web searching   response.web_search_call.completed                        web ended
web ended       response.output_item.done web_search_call                 between

between         response.output_item.added file_search_call               files
files           response.file_search_call.in_progress                     files begun
files begun     response.file_search_call.searching                       files sought
files sought    response.file_search_call.completed                       files ended
files ended     response.output_item.done file_search_call                between

between         response.output_item.added code_interpreter_call          code
code            response.code_interpreter_call.in_progress                code begun
code begun      response.code_interpreter_call_code.delta                 code begun
code begun      response.code_interpreter_call_code.done                  code written
code written    response.code_interpreter_call.interpreting               code running
code running    response.code_interpreter_call.completed                  code ended
code ended      response.output_item.done code_interpreter_call           between

between         response.output_item.added image_generation_call          image
image           response.image_generation_call.in_progress                image begun
image begun     response.image_generation_call.generating                 image growing
image growing   response.image_generation_call.partial_image              image growing
image growing   response.image_generation_call.completed                  image ended
image ended     response.output_item.done image_generation_call           between

between         response.output_item.added mcp_list_tools                 tools
tools           response.mcp_list_tools.in_progress                       tools begun
tools begun     response.mcp_list_tools.completed                         tools ended
tools begun     response.mcp_list_tools.failed                            tools ended
tools ended     response.output_item.done mcp_list_tools                  between

between         response.output_item.added mcp_call                       mcp
mcp             response.mcp_call.in_progress                             mcp begun
mcp begun       response.mcp_call_arguments.delta                         mcp asking
mcp begun       response.mcp_call_arguments.done                          mcp asked
mcp asking      response.mcp_call_arguments.delta                         mcp asking
mcp asking      response.mcp_call_arguments.done                          mcp asked
mcp asking      response.mcp_call.in_progress                             mcp approved
mcp approved    response.mcp_call_arguments.done                          mcp asked
mcp asked       response.mcp_call.completed                               mcp ended
mcp asked       response.mcp_call.failed                                  mcp ended
mcp ended       response.output_item.done mcp_call                        between

beside          response.output_item.added web_search_call                web
beside          response.output_item.added file_search_call               files
beside          response.output_item.added code_interpreter_call          code
beside          response.output_item.added image_generation_call          image
beside          response.output_item.added mcp_list_tools                 tools
beside          response.output_item.added mcp_call                       mcp
"""
