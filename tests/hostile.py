"""Attacks by one client on a running server, and what they do to another client: pauses, memory, what stays.

    python tests/hostile.py [--only NAME] [--server DIR] [--json FILE] [--markdown FILE [--before FILE]]

For each attack of helpers/attacks.py a server is started, with a victim that reads stream after stream and a
ping of /health/live, each in a process of its own. The attacker is one more, which gives way to them (nice).
When it has left, what it had must be free within some seconds, and the server must end when it is told to.
The first row is no attack: it shows what this machine does by itself. Memory is that of the server and its
children, as Linux tells it. The exit status says whether all goals are met.

The goals: whatever one client sends, a stream of another never pauses for more than 100 ms because of it, and
what it makes the server hold is bounded by what it has sent.

Not here: the attacks (helpers/attacks.py); the causes, which the tests of each module hold.
"""

import argparse
import contextlib
import http.client
import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from helpers import attacks
from helpers.attacks import ATTACKER, UPSTREAM, VICTIM, WITNESS, Attack
from helpers.serving import environment, listening

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "models" / "tiny"

CALM_S = 2  # before an attack
FREE_S = 5  # after its client has left
GRACE_S = 2  # --shutdown-grace of the server
POLL_S = 0.05
START_S = 90  # the first start compiles the kernels
MAX_MEMORY_MB = 3000  # a server that takes more is killed, for the sake of this machine

# The goals
MAX_PAUSE_S = 0.1  # beyond the worst one in the calm
MAX_PING_S = 0.2
MEMORY_FACTOR = 2  # bytes held for a byte sent
MEMORY_CONSTANT_MB = 128  # the KV cache, 70 MB here, takes its memory when it is used first

# --- who watches --------------------------------------------------------------------------------------------
# The victim and the ping write a line for each thing that they have waited for, by the clock of the machine.


def report(kind: str, began_at: float) -> None:
    now = time.monotonic()
    line = json.dumps({"kind": kind, "at": began_at, "s": now - began_at})
    print(f"{line}\n", end="", flush=True)  # in one write: the two of a process report at once


def watch(step: Callable[[Callable[[str, float], None]], None]) -> None:
    """Repeat a step until SIGTERM; report what it waits for even then."""
    waiting: list[tuple[str, float]] = []

    def wait_for(kind: str, began_at: float) -> None:
        waiting[:] = [(kind, began_at)]

    def stop(*_: Any) -> None:
        for kind, began_at in waiting:
            report(kind, began_at)
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    while True:
        try:
            step(wait_for)
        except (OSError, http.client.HTTPException, AssertionError) as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            report("failure", time.monotonic())
            time.sleep(0.2)


def read_stream(url: str, key: str, wait_for: Callable[[str, float], None]) -> None:
    """A chat of many small deltas; the wait for each is reported, that for the first one too."""
    host, _, port = urlsplit(url).netloc.partition(":")
    body = attacks.endless(1500, stream=True)
    began_at = time.monotonic()
    wait_for("pause", began_at)
    is_head = True
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        connection.sendall(attacks.http_request("POST", attacks.CHAT, body, key))
        while True:
            data = connection.recv(65536)
            if not data:
                raise ConnectionError("expected [DONE], got the end of the connection")
            if is_head and not data.startswith(b"HTTP/1.1 200"):
                raise ConnectionError(f"expected a stream, got {data[:200]!r}")
            is_head = False
            if b"data: " not in data:
                continue
            report("pause", began_at)
            began_at = time.monotonic()
            wait_for("pause", began_at)
            if b'"error"' in data:
                raise ConnectionError("expected a chunk, got an error")
            if b"[DONE]" in data:
                return


def ping(url: str, wait_for: Callable[[str, float], None]) -> None:
    time.sleep(POLL_S)
    began_at = time.monotonic()
    wait_for("ping", began_at)
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    with contextlib.closing(connection):
        connection.request("GET", "/health/live")
        status = connection.getresponse().status
    assert status == 200
    report("ping", began_at)


class Watcher:
    """One of the two in a process of its own, and what it has reported."""

    def __init__(self, folder: Path, role: str, url: str, key: str) -> None:
        self._path = folder / role
        command = [sys.executable, __file__, "--role", role, "--url", url, "--key", key]
        with self._path.open("w") as out:
            self._process = subprocess.Popen(command, stdout=out)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def worst(self, kind: str, start: float, end: float) -> float:
        """The longest wait of a kind, in s, that fell into some time."""
        waits = [
            event["s"]
            for event in self._events()
            if event["kind"] == kind and event["at"] < end and event["at"] + event["s"] > start
        ]
        return max(waits, default=0)

    def count(self, kind: str, start: float, end: float) -> int:
        return sum(event["kind"] == kind and start <= event["at"] < end for event in self._events())

    def _events(self) -> list[dict[str, Any]]:
        lines = self._path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]


# --- the server ---------------------------------------------------------------------------------------------


class Server:
    """A server that is attacked, as the operating system sees it."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log

    def pids(self) -> list[int]:
        """The process and all below it."""
        pids = [self.process.pid]
        for pid in pids:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    pids += map(int, (task / "children").read_text().split())
        return pids

    def memory_mb(self) -> float:
        """Resident memory of them all."""
        n_pages = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                n_pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return n_pages * resource.getpagesize() / 1e6

    def cpu_s(self) -> float:
        ticks = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def n_files(self) -> int:
        with contextlib.suppress(OSError):
            return len(os.listdir(f"/proc/{self.process.pid}/fd"))
        return 0

    def n_running(self) -> int | None:
        """Sequences of the engine that run or wait; None: it does not say."""
        request = attacks.http_request("GET", "/metrics", None, WITNESS)
        reply = attacks.Client(self.url).ask(request, 2)
        if reply.status != 200:
            return None
        lines = reply.body.decode().splitlines()
        names = ("llmref:num_requests_running", "llmref:num_requests_waiting")
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(names))


@contextlib.contextmanager
def served(args: argparse.Namespace, attack: Attack, folder: Path, upstream_port: int) -> Iterator[Server]:
    flags = ["--model", str(args.model), "--port", "0", "--threads", "1", "--shutdown-grace", str(GRACE_S)]
    for flag in attack.flags:
        if flag == UPSTREAM:
            flags += ["--upstream", f"http://127.0.0.1:{upstream_port}/v1"]
        else:
            flags.append(flag)
    if attack.keys:
        for key in (VICTIM, ATTACKER, WITNESS):
            flags += ["--api-key", key]
    limit_files = None
    if attack.max_files:
        limit = (attack.max_files, attack.max_files)
        limit_files = partial(resource.setrlimit, resource.RLIMIT_NOFILE, limit)
    log = folder / "log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "server.py", *flags],
            cwd=args.server,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            preexec_fn=limit_files,
        ) as process,
    ):
        server = Server(process, "", log)
        try:
            server.url = listening(process, log, START_S)
            yield server
        finally:
            for pid in server.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


# --- one attack ---------------------------------------------------------------------------------------------


@dataclass
class Result:
    """A row of the table."""

    attack: str
    right: str = ""  # what is right
    answer: str = ""  # what came instead; "": what is right
    calm_ms: float = 0  # worst wait of the victim for its next delta, before the attack
    pause_ms: float = 0  # the same, from the attack on
    ping_ms: float = 0
    n_failures: int = 0  # streams of the victim that failed
    sent_mb: float = 0
    memory_mb: float = 0  # peak, beyond what was there before
    kept_mb: float = 0  # at the end, beyond that
    freed: str = ""  # what was not free when it had to be; "": all was
    stop_s: float = 0  # from SIGTERM to the end of the server

    def failed_goals(self, calm_ms: float) -> list[str]:
        """`calm_ms`: worst pause in the row without an attack."""
        max_pause_ms = max(self.calm_ms, calm_ms) + MAX_PAUSE_S * 1000
        max_memory_mb = MEMORY_FACTOR * self.sent_mb + MEMORY_CONSTANT_MB
        goals = {
            "answer": not self.answer,
            "pause": self.pause_ms <= max_pause_ms,
            "ping": self.ping_ms <= MAX_PING_S * 1000,
            "victim": self.n_failures == 0,
            "memory": self.memory_mb <= max_memory_mb,
            "freed": not self.freed,
            "stop": self.stop_s <= GRACE_S + 1.5,
        }
        return [name for name, is_met in goals.items() if not is_met]


def measure(args: argparse.Namespace, attack: Attack) -> Result:
    """Attack a server of its own."""
    upstream_port = free_port()
    result = Result(attack.name, attack.right)
    with (
        tempfile.TemporaryDirectory() as folder,
        served(args, attack, Path(folder), upstream_port) as server,
    ):
        with watchers(Path(folder), server.url, attack) as (victim, pinger):
            wait(10, lambda: victim.count("pause", 0, time.monotonic()) > 100)
            calm_from = time.monotonic()
            time.sleep(CALM_S)
            attacked_at = time.monotonic()
            memory_mb = server.memory_mb()
            n_files = server.n_files()
            peak_mb = run_attacker(attack, server, upstream_port, result, memory_mb)
            left_at = time.monotonic()
            if not attack.goes_on and not wait(FREE_S, lambda: not why_not_free(server, n_files)):
                result.freed = why_not_free(server, n_files)
            ended_at = time.monotonic()
        if not attack.goes_on and not result.freed:
            seconds_left = left_at + FREE_S - time.monotonic()
            if not wait(seconds_left, partial(idles, server)):
                result.freed = "still busy"
        result.kept_mb = server.memory_mb() - memory_mb
        result.memory_mb = max(peak_mb, server.memory_mb()) - memory_mb
        result.stop_s = stop(server)
        result.calm_ms = 1000 * victim.worst("pause", calm_from, attacked_at)
        result.pause_ms = 1000 * victim.worst("pause", attacked_at, ended_at)
        result.ping_ms = 1000 * pinger.worst("ping", attacked_at, ended_at)
        for watcher in (victim, pinger):
            result.n_failures += watcher.count("failure", attacked_at, ended_at)
    return result


@contextlib.contextmanager
def watchers(folder: Path, url: str, attack: Attack) -> Iterator[tuple[Watcher, Watcher]]:
    """The victim and the ping, until the block is left."""
    keys = (VICTIM, WITNESS) if attack.keys else ("", "")
    victim = Watcher(folder, "victim", url, keys[0])
    pinger = Watcher(folder, "ping", url, keys[1])
    try:
        yield victim, pinger
    finally:
        victim.stop()
        pinger.stop()


def run_attacker(
    attack: Attack, server: Server, upstream_port: int, result: Result, memory_mb: float
) -> float:
    """Run the attack to its end or its limit; return the peak of the server's memory in MB."""
    command = [sys.executable, __file__, "--role", "attack", "--only", attack.name, "--url", server.url]
    deadline = time.monotonic() + attack.limit_s
    peak_mb = memory_mb
    result.answer = "the attacker was stopped"
    with subprocess.Popen(
        [*command, "--upstream-port", str(upstream_port)], stdout=subprocess.PIPE, text=True
    ) as attacker:
        while attacker.poll() is None:
            time.sleep(POLL_S)
            peak_mb = max(peak_mb, server.memory_mb())
            if peak_mb > memory_mb + MAX_MEMORY_MB:
                server.process.kill()
                result.answer = "the server was killed for its memory"
                attacker.kill()
            if time.monotonic() > deadline + FREE_S:
                attacker.kill()
            elif time.monotonic() > deadline:
                attacker.terminate()  # it says what it has sent
        assert attacker.stdout
        said = attacker.stdout.read()
    if said:
        outcome = json.loads(said)
        result.answer = outcome["problem"]
        result.sent_mb = outcome["n_sent"] / 1e6
    return peak_mb


def why_not_free(server: Server, n_files: int) -> str:
    """What the attack still holds; "": nothing. The victim's own stream may run."""
    n_running = server.n_running()
    if n_running is None:
        return "no answer"
    if n_running > 1:
        return f"{n_running - 1} sequences"
    n_more_files = server.n_files() - n_files
    if n_more_files > 5:
        return f"{n_more_files} files"
    return ""


def idles(server: Server) -> bool:
    """Whether nothing is computed any more, where the victim has left too."""
    before = server.cpu_s()
    time.sleep(0.3)
    return server.cpu_s() - before < 0.1


def stop(server: Server) -> float:
    """Seconds from SIGTERM to the end."""
    began_at = time.monotonic()
    server.process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(GRACE_S + 8)
    return time.monotonic() - began_at


def wait(seconds: float, holds: Callable[[], bool]) -> bool:
    """Wait until it holds, at most so long; it is looked at once at least."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


# --- the table ----------------------------------------------------------------------------------------------

HEAD = "attack|pause, ms (calm)|ping, ms|memory, MB (sent)|kept, MB|freed|stop, s|answer|goals"
HEAD_BEFORE = "pause before, ms|ping before, ms|memory before, MB|goals before"


def cells(result: Result, calm_ms: float) -> list[str]:
    return [
        result.attack,
        f"{result.pause_ms:.0f} ({result.calm_ms:.0f})",
        f"{result.ping_ms:.0f}",
        f"{result.memory_mb:.0f} ({result.sent_mb:.2f})",
        f"{result.kept_mb:.0f}",
        result.freed or "yes",
        f"{result.stop_s:.1f}",
        " ".join(result.answer.split()).replace("|", "\\|") or f"right: {result.right}",
        verdict(result, calm_ms),
    ]


def cells_before(result: Result | None, calm_ms: float) -> list[str]:
    """What was measured of another server."""
    if result is None:
        return ["", "", "", ""]
    numbers = (result.pause_ms, result.ping_ms, result.memory_mb)
    return [*(f"{number:.0f}" for number in numbers), verdict(result, calm_ms)]


def verdict(result: Result, calm_ms: float) -> str:
    failed = result.failed_goals(calm_ms)
    if failed:
        return "fails: " + ", ".join(failed)
    return "pass"


def markdown(results: Sequence[Result], before: Sequence[Result], about: str) -> str:
    calm_ms = results[0].pause_ms
    table = [HEAD.split("|")] + [cells(result, calm_ms) for result in results]
    if before:
        of_before = {result.attack: result for result in before}
        table[0] += HEAD_BEFORE.split("|")
        for row in table[1:]:
            row += cells_before(of_before.get(row[0]), before[0].pause_ms)
    table.insert(1, ["---"] * len(table[0]))
    lines = "\n".join("| " + " | ".join(row) + " |" for row in table)
    n_passed = sum(not result.failed_goals(calm_ms) for result in results)
    goals = (
        f"Goals: no pause of the victim over {1000 * MAX_PAUSE_S:.0f} ms beyond the calm, no ping over "
        f"{1000 * MAX_PING_S:.0f} ms, memory within {MEMORY_FACTOR} x the bytes sent and "
        f"{MEMORY_CONSTANT_MB} MB, all freed {FREE_S} s after the client has left, the end within "
        f"{GRACE_S} s and a bit after SIGTERM, the right answer. {n_passed} of {len(results)} rows pass."
    )
    return f"# Hostile clients\n\n{about}\n\n{goals}\n\n{lines}\n"


def about(args: argparse.Namespace) -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())
    n_cpus = len(os.sched_getaffinity(0))
    git = ["git", "-C", str(args.server), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "no commit"
    return (
        f"`python tests/hostile.py`, {date.today()}; {n_cpus} processors of {cpu}; Python "
        f"{platform.python_version()}; the server is that of {commit}, with {args.model.name}."
    )


def main() -> int:
    args = arguments()
    if args.role == "attack":
        attacks.run(args.only[0], args.url, args.upstream_port)
    if args.role == "victim":
        watch(partial(read_stream, args.url, args.key))
    if args.role == "ping":
        watch(partial(ping, args.url))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server and the watchers end too
    chosen = [attack for attack in attacks.ATTACKS if not args.only or attack.name in (*args.only, "calm")]
    before: list[Result] = []
    if args.before:
        before = [Result(**row) for row in json.loads(args.before.read_text())]
    results: list[Result] = []
    for n, attack in enumerate(chosen, 1):
        started_at = time.monotonic()
        results.append(measure(args, attack))
        row = " | ".join(cells(results[-1], results[0].pause_ms))
        print(f"{n} of {len(chosen)}, {time.monotonic() - started_at:.0f} s: {row}", flush=True)
        if args.json:
            args.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
        if args.markdown:
            args.markdown.write_text(markdown(results, before, about(args)))
    calm_ms = results[0].pause_ms
    n_failed = sum(bool(result.failed_goals(calm_ms)) for result in results)
    print(f"{len(results) - n_failed} of {len(results)} rows pass")
    return min(n_failed, 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [attack.name for attack in attacks.ATTACKS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--server", type=Path, default=ROOT, metavar="DIR", help="another checkout to attack")
    parser.add_argument("--model", type=Path, default=TINY, metavar="DIR", help="default: tests/models/tiny")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--before", type=Path, metavar="FILE", help="a --json of another server to show too")
    for internal in ("--role", "--url", "--key"):  # of the processes that this script starts
        parser.add_argument(internal, default="", help=argparse.SUPPRESS)
    parser.add_argument("--upstream-port", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
