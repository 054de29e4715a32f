"""One choice of a prompt: what the worker says, counted, logged, and in the words of the client's own tools.

    Prompt --run_choice()--> emit(Accepted), emit(Output), ..., emit(Finish)

Authority: rule 2 of worker.py, which this keeps even if a worker has a bug.
"""

import logging
import time

from channels import Accepted, Emit, Finish, Output, Usage
from request.tool_calls import Restorer
from service.metrics import Metrics, Run
from worker import Prompt

log = logging.getLogger("choices")

CUT_OFF = Finish("cancelled")  # for metrics and log: the run was cancelled before the worker said another end


async def run_choice(prompt: Prompt, choice: int, metrics: Metrics, emit: Emit) -> None:
    """Run one choice of a prompt, count and log it, and name its calls as the client does.

    It emits one Finish, which is the last, but in two cases none: an exception before Accepted refuses the
    request; and if the task is cancelled, the worker's Finish is only counted, and Registry._run() of
    background.py ends the response.
    """
    watch = Run(metrics)
    started_at = time.monotonic()
    restorer = Restorer(prompt.request.called)
    accepted = False
    end = CUT_OFF

    def emit_restored(said: Accepted | Output | Finish) -> None:
        nonlocal accepted, end
        if isinstance(said, Accepted):
            accepted = True
            emit(said)
            return
        if not isinstance(said, Finish):
            watch.piece()
        for one in restorer.feed(said):
            if isinstance(one, Finish):
                end = one  # emitted when the run is over
            else:
                emit(one)

    try:
        await prompt.run(emit_restored, choice)
        if end is CUT_OFF:
            end = Finish("failed", message="The worker ended without finishing.")
    except Exception as error:
        message = f"{type(error).__name__} in the worker; the server's log has the details."
        end = Finish("failed", message=message)
        if not accepted:
            raise
        log.exception("the worker failed")
    finally:
        usage = end.usage or Usage(0, 0)
        n_in, n_out = usage.input_tokens, usage.output_tokens
        watch.end(end.reason, n_in, usage.cached_tokens, n_out)
        log.info("%s: %d tokens in, %d out, %.2f s", end.reason, n_in, n_out, time.monotonic() - started_at)
    emit(end)
