"""A chat template tried in a process that can be killed, before this server renders anything with it.

    directory --check_template()--> python -m service.template_check DIR --main()--> the probes, rendered

A template is a program that comes with a model. Jinja's sandbox keeps it from files and from Python, but not
from loops that never end, nor from texts that fill the memory. Neither can be stopped from inside: a thread
cannot be ended, and one multiplication of Python's may take hours.

Authority: https://jinja.palletsprojects.com/en/stable/sandbox/#security-considerations: "You should run your
application with limits on resources such as CPU and memory".

Rules of this file:
1. What a template may use is counted in processor time and memory, so a busy machine refuses no good one.
2. The templates of the families take 0.1 s; a template that needs much more for "Hi" is refused at the start.

Not here: what is wrong with a template that ends (request/template.py says it), requests: a template that
ends with the probes is trusted to end with them too.
"""

import contextlib
import resource
import subprocess
import sys
from pathlib import Path

from request.template import BadTemplate, ChatTemplate

MAX_CPU_S = 3
LIMITS = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_CPU: MAX_CPU_S,
    resource.RLIMIT_AS: 2**30,  # bytes of addresses
}
ROOT = Path(__file__).parents[1]


def check_template(directory: Path) -> None:
    """Render the probes of the model's chat template; raises BadTemplate where that does not end well."""
    command = [sys.executable, "-m", "service.template_check", str(directory.absolute())]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
    if ended.returncode == 0:
        return
    reason = f"it takes more than {MAX_CPU_S} s"
    if ended.returncode > 0:  # else a signal has ended it
        *_, reason = ended.stderr.strip().split("\n")
    raise BadTemplate(f"the chat template of {directory} cannot be rendered: {reason}")


def main() -> None:
    """Load the template under limits; Python says on stderr what it raises."""
    for kind, limit in LIMITS.items():
        _, operators_limit = resource.getrlimit(kind)
        if operators_limit != resource.RLIM_INFINITY:
            limit = min(limit, operators_limit)
        resource.setrlimit(kind, (limit, operators_limit))
    with contextlib.suppress(BadTemplate):  # the server comes to it as well, and has a line for it
        ChatTemplate.load(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
