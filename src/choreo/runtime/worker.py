"""A worker: a process that runs sites for a coordinator, until the coordinator sends `stop` or is gone.

On its own machine, the coordinator starts a worker as `python -m choreo.runtime.worker FD`. FD is the file descriptor of a
socket to the coordinator. On another host, the agent starts a worker as
`python -m choreo.runtime.worker --remote HOST KEY FD`. Here FD is the file descriptor of a socket to the agent. Such a worker
listens at the address HOST, and admits only the coordinator with the public key KEY. It writes its own port and public key to
FD, and it ends when the agent closes the socket.

A worker gets exported programs and pickled environments. It never traces the user's functions, and never imports the user's
main module.

    command    contents                                                          reply
    versions   names of packages, folders of Python modules                      versions: of packages, CPU, XLA_FLAGS
    set_up     name, process of each site, channels, programs                    ready
    start      the keys of `init` and of the iterations                          done
    run        the numbers of the iterations: first .. stop - 1                  ran: metrics, log of versions read
    carry      extents of leaves that its sites hold                             carry: their elements
    restore    the leaves for its sites, the key of the iterations               done
    host_states                                                                  host_states: of its Python objects
    load_host_states   the states of the Python objects of all workers           done
    profile                                                                      profile: the times of its steps
    stop                                                                         none: closes its environments, and ends

With channels over TCP, with channels that one worker passes to another, or with collectives, `set_up` has more steps, so that no
worker connects before its peer admits it. `─▶` is a command, `◀─` a reply:

    set_up ─▶   ◀─ listening: address, key   contacts: of all workers ─▶   ◀─ admitted   connect ─▶   ◀─ ready

Between `contacts` and `admitted`, workers of the same agent pass each other channels in shared memory. The command `connect`
lists the channels that were passed.

The main thread executes commands. A second thread receives commands, answers heartbeats (`heartbeat.py`), and ends the
process at once when the coordinator is gone. A third thread watches for an environment that hangs.
"""

import faulthandler
import json
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

import numpy as np

from choreo.errors import ChoreoError, EnvError, RunError
from choreo.runtime.channels.links import Links
from choreo.runtime.coordinator.control_frames import BEAT, PROGRESS, Frame, receive_frame, send_frame
from choreo.runtime.heartbeat import activity, stack_text

POLL_S = 0.5
"""The time between two checks whether an environment hangs."""
CONNECT_S = 60.0
"""How long a worker on another host waits for its coordinator to connect."""
PROGRESS_S = 0.5
"""The shortest time between two progress reports of a worker."""


def main() -> int:
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator handles Ctrl-C
    if sys.argv[1] == "--remote":
        control, relay, keys = _await_coordinator(sys.argv[2], sys.argv[3].encode(), int(sys.argv[4]))
    else:
        control, relay, keys = socket.socket(fileno=int(sys.argv[1])), None, None
    control.set_inheritable(False)
    worker, code = Worker(control, keys), 0
    try:
        worker.serve()
    except BaseException as error:  # noqa: BLE001  the coordinator must learn of every error
        worker.report(error)
        code = 1
    worker.ending = True
    if relay is not None:
        control.shutdown(socket.SHUT_WR)  # this makes the relay send the last bytes to the coordinator, and end
        relay.join()
    if worker.in_collective:  # at a normal exit, JAX would wait for the other workers, and abort if a worker is gone
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _await_coordinator(host: str, coordinator: bytes, agent: int) -> tuple[socket.socket, threading.Thread, Any]:
    """Wait until the coordinator, which is on another host, connects to this worker.

    Returns the control socket, the thread that relays bytes between this socket and the tunnel, and the worker's new key pair.
    """
    from choreo.runtime.channels.keys import KeyPair
    from choreo.runtime.coordinator.tunnel import SILENCE_VARIABLE, Tunnel, start_relay

    keys = KeyPair.new()
    tunnel, port = Tunnel.listen(host, keys, coordinator, float(os.environ[SILENCE_VARIABLE]))
    os.write(agent, json.dumps({"port": port, "key": keys.public.decode()}).encode())
    os.set_inheritable(agent, False)
    if not tunnel.await_peer(time.monotonic() + CONNECT_S):
        sys.exit(f"No coordinator connected within {CONNECT_S:g} s.")
    return *start_relay(tunnel, agent), keys


class Worker:
    """Executes the commands of the coordinator, in the main thread."""

    def __init__(self, control: socket.socket, keys: Any = None):
        """`keys` is the key pair of a worker on another host, or None on the coordinator's machine."""
        self.control, self.keys, self.name = control, keys, "worker"
        self.commands: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self.sending = threading.Lock()
        self.execution: Any = None
        self.recorder: Any = None
        self.links: Links | None = None
        self.env_timeout_s = 0.0
        self.in_collective = False
        self.ending = False
        self.progress_sent_at = 0.0
        self.steps_done = 0
        """How many commands and iterations this worker has begun."""
        threading.Thread(target=self._listen, name="choreo-control", daemon=True).start()

    def serve(self) -> None:
        while True:
            header, arrays = self.commands.get()
            self.steps_done += 1
            kind = header["kind"]
            if kind == "stop":
                return self._stop()
            getattr(self, f"_{kind}")(header, arrays)

    def _stop(self) -> None:
        try:
            if self.execution is not None:
                self.execution.close()
        except Exception:  # noqa: BLE001  the run is over, so an error of an environment is only printed
            traceback.print_exc()
        if self.links is not None:
            self.links.close()

    def _versions(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        from choreo.runtime.coordinator.versions import this_machine

        # A worker must also find modules in the folder of the user's script. The coordinator's folders and the current folder
        # come last, so that a file in them does not replace an installed package of the same name.
        sys.path.extend(folder for folder in [*header["path"], os.getcwd()] if folder not in sys.path)
        self._send({"kind": "versions", "versions": this_machine(header["packages"]).to_json()})

    def _set_up(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        began = time.perf_counter()
        self.name, self.env_timeout_s = header["name"], header["env_timeout_s"]
        silence_s = header["silence_s"]
        self.links = Links(
            self.name,
            header["links"],
            host=header["host"],
            keys=self.keys,
            silence_s=silence_s,
            secret=header["secret"],
        )
        rendezvous, collective = {}, header["collective"]
        if header["introduction"]:
            here = {
                "group": collective and collective["group"],
                "rendezvous": _free_address(collective["address"]) if collective and collective["rank"] == 0 else None,
            }
            self._send({"kind": "listening", "contact": self.links.contact, **here})
            introduction = self._next("contacts")
            rendezvous = introduction["rendezvous"]
            self.links.admit(introduction["contacts"])
            self._send({"kind": "admitted", "passed": self.links.pass_on(introduction["contacts"])})
            self.links.connect(introduction["contacts"], self._next("connect")["passed"])
        from choreo.runtime.engine.arrivals import Arrivals
        from choreo.runtime.engine.backend import PythonOnly
        from choreo.runtime.engine.execution import Execution
        from choreo.runtime.engine.messages import Topology

        programs = _load(arrays[0].tobytes())
        process_of_site = {(group, r): process for group, r, process in header["process_of_site"]}
        topology = Topology(
            me=self.name,
            process_of_site=process_of_site,
            links=self.links.by_peer,
            wait_for_any=self.links.wait_for_any,
        )
        if header["profile"]:
            from choreo.runtime.engine.profile import Recorder

            self.recorder = Recorder()
        timed = self.recorder and self.recorder.timed
        if collective:
            _join_collective(collective, rendezvous[collective["group"]], header["collective_silence_s"])
            self.in_collective = True
        backend = _jax_backend(header, timed) if header["platforms"] else PythonOnly()
        self.execution = (Arrivals if programs.num_workers > 1 else Execution)(programs, topology, backend, timed)
        self._send({"kind": "ready", "seconds": time.perf_counter() - began})

    def _next(self, kind: str) -> dict[str, Any]:
        """Wait for the next command, which must be of this kind. Returns its header."""
        header, _ = self.commands.get()
        assert header["kind"] == kind, header
        return header

    def _start(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        self._restart_deadline()
        self.execution.start(*arrays)
        self._done()

    def _run(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        metrics = self.execution.run(header["first"], header["stop"], self._begins)
        names = [[*site, name] for site, values in metrics.items() for name in values]
        values = [value for values in metrics.values() for value in values.values()]
        self._send({"kind": "ran", "names": names, "log": self.execution.log, **self._state()}, values)

    def _begins(self, iteration: int) -> None:
        """Tell the coordinator that this worker begins an iteration, but at most once in PROGRESS_S seconds."""
        self.steps_done += 1
        if time.monotonic() - self.progress_sent_at > PROGRESS_S:
            self.progress_sent_at = time.monotonic()
            self._send({"kind": PROGRESS, "iteration": iteration})

    def _carry(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        leaves, to_host, extents = self.execution.leaves, self.execution.backend.to_host, header["extents"]
        arrays = [
            to_host(leaves[group, r][i]).reshape(outer, -1)[slice(*rows), slice(*columns)]
            for group, r, i, outer, rows, columns in extents
        ]
        self._send({"kind": "carry", "sites": [(group, r) for group, r, *_ in extents]}, arrays)

    def _restore(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        backend, program, num_carry = self.execution.backend, self.execution.programs.iterate, header["num_carry"]
        leaves: dict[Any, list[Any]] = {site: [None] * num_carry for site in self.execution.topology.sites}
        for (group, r, i), array in zip(header["names"], arrays[1:], strict=True):
            leaves[group, r][i] = backend.from_host(array, program.ins[i].aval, (group, r))
        self._restart_deadline()
        self.execution.restore(leaves, arrays[0])
        self._done()

    def _host_states(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        from choreo.host.states import encode
        from choreo.runtime.engine.host_states import collect

        self._restart_deadline()
        found, lost = collect(self.execution)
        parts, held = encode([[part.number, part.first, list(part.states)] for part in found], self.name)
        self._send({"kind": "host_states", "parts": parts, "lost": lost}, held)

    def _load_host_states(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        from choreo.host.states import decode
        from choreo.runtime.engine.host_states import load

        self._restart_deadline()
        load(self.execution, {number: decode(states, arrays) for number, states in header["objects"]})
        self._done()

    def _profile(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        self._send({"kind": "profile", "recorded": self.recorder.to_json()})

    def _done(self) -> None:
        self._send({"kind": "done", **self._state()})

    def _state(self) -> dict[str, Any]:
        return {"compile_seconds": getattr(self.execution.backend, "compile_seconds", 0.0)}

    def report(self, error: BaseException) -> None:
        """Send the coordinator the error that ends this worker."""
        error = self._blame(error)
        text = "".join(traceback.format_exception(error))
        known = isinstance(error, ChoreoError)
        self._send({
            "kind": "error",
            "known": known,
            "type": type(error).__name__,
            "what": error.what if known else str(error),
            "fix": error.fix if known else None,
            "places": error.places if known else {},
            "traceback": text,
        })  # fmt: skip

    def _blame(self, error: BaseException) -> BaseException:
        """If an environment was running when `error` was raised, return an EnvError with its number; otherwise return `error`.

        Errors of Choreo are returned unchanged. Most errors of environments have already become EnvErrors, which name the
        environment. This function is for the other errors, such as KeyboardInterrupt.
        """
        index = None if self.execution is None or isinstance(error, ChoreoError) else self.execution.current_env()
        if index is None:
            return error
        found = EnvError(f"Environment {index} raised {type(error).__name__}: {error}")
        found.__cause__ = error
        return found

    def _send(self, header: dict[str, Any], arrays: Any = ()) -> None:
        with self.sending:
            try:
                send_frame(self.control, header, arrays)
            except OSError:
                _end_now()  # the coordinator is gone

    def _listen(self) -> None:
        try:
            self.control.settimeout(None)
            threading.Thread(target=self._watch, name="choreo-watch", daemon=True).start()
            while (frame := receive_frame(self.control)) is not None:
                if frame[0]["kind"] == BEAT:
                    self._answer(with_stack=frame[0]["stack"])
                else:
                    self.commands.put(frame)
        finally:
            if not self.ending:
                _end_now()

    def _answer(self, *, with_stack: bool) -> None:
        """Tell the coordinator that this process is alive, and whether its main thread moves."""
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        messages = 0 if self.links is None else self.links.messages
        calls = 0 if self.execution is None else self.execution.host_calls()
        stack = stack_text(frame) if with_stack else ""
        self._send(
            {"kind": BEAT, "moves": self.steps_done + messages + calls, "doing": activity(frame), "stack": stack}
        )

    def _watch(self) -> None:
        """Poll until an environment hangs. Then report the environment, and end the process.

        This thread counts its own polls instead of seconds, so that the time in which the process is stopped (SIGSTOP) does
        not count. An environment that hangs may also hold the interpreter lock, so that this thread cannot run. Then the timer of
        `faulthandler`, which does not need the lock, ends the process.
        """
        last_calls, polls = 0, 0
        while True:
            time.sleep(POLL_S)
            calls = 0 if self.execution is None else self.execution.host_calls()
            if not calls:
                continue
            still_in_call = calls == last_calls and calls % 2  # the counter is odd during a call
            polls = polls + 1 if still_in_call else 0
            last_calls = calls
            if self.env_timeout_s and polls * POLL_S > self.env_timeout_s:
                self.report(self._hanging())
                _end_now()
            self._restart_deadline()

    def _restart_deadline(self) -> None:
        """Restart the timer of `faulthandler`. If this function is not called again in time, the timer ends this process."""
        if self.env_timeout_s and self.execution.runs_python:
            faulthandler.dump_traceback_later(self.env_timeout_s + 4 * POLL_S, exit=True)

    def _hanging(self) -> EnvError:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        lines = traceback.format_stack(frame)[-6:]
        index = self.execution.current_env()
        which = "An environment" if index is None else f"Environment {index}"
        return EnvError(
            f"{which} hangs: it has not returned for {self.env_timeout_s:g} s.\n{''.join(lines).rstrip()}",
            fix="Correct the environment, or allow it more time: --env-timeout SECONDS.",
        )


def _load(programs: bytes) -> Any:
    """Unpickle the `Programs` of the command `set_up`."""
    import cloudpickle

    try:
        return cloudpickle.loads(programs)
    except (ImportError, AttributeError) as error:
        raise RunError(
            f"The programs of this worker need a module or a name that the worker cannot import: {error}",
            fix="Install the module, put it in the folder of your script, or define the missing name in the script itself.",
        ) from error


def _free_address(host: str) -> str:
    """Find a free port of this host. Returns the address at which JAX's coordination service for a group will listen."""
    with socket.socket() as free:
        free.bind((host, 0))
        return f"{host}:{free.getsockname()[1]}"


def _join_collective(collective: dict[str, Any], rendezvous: str, silence_s: float) -> None:
    """Connect JAX in this worker to JAX in the other workers of the group, so that compiled programs can combine their values.

    JAX aborts these workers if one of them is silent for `silence_s` seconds. The connections are neither encrypted nor
    authenticated. So their ports are opened only at the address in `collective`.
    """
    import jax

    from choreo._compat import use_gloo_at
    from choreo.runtime.coordinator.cluster import is_loopback

    # Without this option, a worker aborts when a peer dies, and cannot report the error.
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(
        rendezvous,
        num_processes=collective["size"],
        process_id=collective["rank"],
        heartbeat_timeout_seconds=math.ceil(silence_s),
        coordinator_bind_address=rendezvous,  # by default, JAX would listen at all network interfaces
    )
    use_gloo_at(collective["address"])
    if is_loopback(collective["address"]):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")  # by default NCCL uses every interface except loopback


def _jax_backend(header: dict[str, Any], timed: Any) -> Any:
    import jax

    jax.config.update("jax_enable_x64", header["x64"])
    jax.config.update("jax_default_prng_impl", header["prng"])
    # Asynchronous dispatch would save no time: an actor cannot do anything before it has the action.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if header["num_devices"]:  # sets the number of CPU devices; has no effect on accelerators
        jax.config.update("jax_num_cpu_devices", max(header["num_devices"].values()))
    from choreo.runtime.compilation_cache import use_compilation_cache
    from choreo.runtime.engine.jax_backend import JaxBackend

    use_compilation_cache()
    return JaxBackend(header["platforms"], timed, num_devices=header["num_devices"])


def _end_now() -> None:
    """Kill this process and all processes that its environments have started. They are in the same process group."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
