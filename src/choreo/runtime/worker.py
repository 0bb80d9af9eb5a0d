"""One worker: a process that runs the sites it is told to, until its coordinator says stop or is gone.

Started as `python -m choreo.runtime.worker FD`, where FD is a socket to the coordinator, or by the agent of another host as
`python -m choreo.runtime.worker --remote HOST KEY FD`: then it listens at HOST for the coordinator with that public key, writes its
own port and public key to FD, a socket to the agent, and ends when that is closed. It never traces and never imports the
user's main: what it runs arrives as compiled programs, and host environments by value.

    command    with                                                              reply
    versions   names of packages                                                 versions: of packages, CPU, XLA_FLAGS
    set_up     name, process of each site, channels, programs                    ready
    start      the keys of `init` and of the iterations                          done
    run        first and stop                                                    ran: metrics, log of versions read
    carry                                                                        carry: the leaves that its sites hold
    restore    the leaves that its sites shall hold, the key of the iterations   done
    profile                                                                      profile: what it spent its time on
    stop                                                                         closes the environments, and ends

With channels over TCP, or with collectives, `set_up` has more steps, so that nobody connects to a closed door:

    set_up ─▶   ◀─ listening: address, key   contacts: those of all workers ─▶   ◀─ admitted   connect ─▶   ◀─ ready

A second thread listens: it hears at once when the coordinator is gone, and notices when an environment hangs.
"""

import faulthandler
import json
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
from choreo.runtime.coordinator.control_frames import PROGRESS, Frame, receive_frame, send_frame

POLL_S = 0.5
"""How often the listening thread looks for an environment that hangs."""
COME_S = 60.0
"""How long a worker on another host waits for its coordinator."""
TELL_S = 0.5
"""How often a worker says, at most, at which iteration it is."""


def main() -> int:
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to hear
    if sys.argv[1] == "--remote":
        control, relay, keys = _await_coordinator(sys.argv[2], sys.argv[3].encode(), int(sys.argv[4]))
    else:
        control, relay, keys = socket.socket(fileno=int(sys.argv[1])), None, None
    control.set_inheritable(False)
    worker, code = Worker(control, keys), 0
    try:
        worker.serve()
    except BaseException as error:  # noqa: BLE001  whatever it is, the coordinator must hear of it
        worker.report(error)
        code = 1
    worker.ending = True
    if relay is not None:
        control.shutdown(socket.SHUT_WR)  # all is said; what was said must still leave this process
        relay.join()
    if worker.in_collective:  # JAX would wait for them at exit, and abort if one is gone
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _await_coordinator(host: str, coordinator: bytes, agent: int) -> tuple[socket.socket, threading.Thread, Any]:
    """The control socket of a worker on another host, the thread behind it, and the pair of keys that it has made."""
    from choreo.runtime.channels.keys import KeyPair
    from choreo.runtime.coordinator.tunnel import Tunnel, start_relay

    keys = KeyPair.new()
    tunnel, port = Tunnel.listen(host, keys, coordinator)
    os.write(agent, json.dumps({"port": port, "key": keys.public.decode()}).encode())
    os.set_inheritable(agent, False)
    if not tunnel.await_peer(time.monotonic() + COME_S):
        sys.exit(f"No coordinator came within {COME_S:g} s.")
    return *start_relay(tunnel, agent), keys


class Worker:
    """The main thread's side."""

    def __init__(self, control: socket.socket, keys: Any = None):
        """`keys` is the pair of a worker on another host."""
        self.control, self.keys, self.name = control, keys, "worker"
        self.commands: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self.sending = threading.Lock()
        self.execution: Any = None
        self.recorder: Any = None
        self.links: Links | None = None
        self.env_timeout_s = 0.0
        self.in_collective = False
        self.ending = False
        self.told = 0.0
        threading.Thread(target=self._listen, name="choreo-control", daemon=True).start()

    def serve(self) -> None:
        while True:
            header, arrays = self.commands.get()
            kind = header["kind"]
            if kind == "stop":
                return self._stop()
            getattr(self, f"_{kind}")(header, arrays)

    def _stop(self) -> None:
        try:
            if self.execution is not None:
                self.execution.close()
        except Exception:  # noqa: BLE001  the run is over: what an environment says now is for people
            traceback.print_exc()
        if self.links is not None:
            self.links.close()

    def _versions(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        from choreo.runtime.coordinator.versions import this_machine

        # Modules that the coordinator finds beside the user's script are needed here, too. After all others, those in the
        # current folder: what is installed comes first, so that no file that happens to lie there stands in for it.
        sys.path.extend(folder for folder in [*header["path"], os.getcwd()] if folder not in sys.path)
        self._send({"kind": "versions", "versions": this_machine(header["packages"]).to_json()})

    def _set_up(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        began = time.perf_counter()
        self.name, self.env_timeout_s = header["name"], header["env_timeout_s"]
        self.links = Links(self.name, header["links"], host=header["host"], keys=self.keys)
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
            self._send({"kind": "admitted"})
            self._next("connect")
            self.links.connect(introduction["contacts"])
        from choreo.runtime.engine.arrivals import Arrivals
        from choreo.runtime.engine.backend import PythonOnly
        from choreo.runtime.engine.execution import Execution
        from choreo.runtime.engine.messages import Topology

        programs = _load(arrays[0].tobytes())
        process_of_site = {(group, r): process for group, r, process in header["process_of_site"]}
        topology = Topology(me=self.name, process_of_site=process_of_site, links=self.links.by_peer)
        if header["profile"]:
            from choreo.runtime.engine.profile import Recorder

            self.recorder = Recorder()
        timed = self.recorder and self.recorder.timed
        if collective:
            _join_collective(collective, rendezvous[collective["group"]])
            self.in_collective = True
        backend = _jax_backend(header, timed) if header["platforms"] else PythonOnly()
        self.execution = (Arrivals if programs.num_workers > 1 else Execution)(programs, topology, backend, timed)
        self._send({"kind": "ready", "seconds": time.perf_counter() - began})

    def _next(self, kind: str) -> dict[str, Any]:
        """The next command, which must be this one."""
        header, _ = self.commands.get()
        assert header["kind"] == kind, header
        return header

    def _start(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        self._expect_a_sign_of_life()
        self.execution.start(*arrays)
        self._done()

    def _run(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        metrics = self.execution.run(header["first"], header["stop"], self._begins)
        names = [[*site, name] for site, values in metrics.items() for name in values]
        values = [value for values in metrics.values() for value in values.values()]
        self._send({"kind": "ran", "names": names, "log": self.execution.log, **self._state()}, values)

    def _begins(self, iteration: int) -> None:
        """Tell the coordinator how far this worker is, now and then."""
        if time.monotonic() - self.told > TELL_S:
            self.told = time.monotonic()
            self._send({"kind": PROGRESS, "iteration": iteration})

    def _carry(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        held = [((*site, i), leaf) for site, leaves in self.execution.leaves.items()
                for i, leaf in enumerate(leaves) if leaf is not None]  # fmt: skip
        to_host = self.execution.backend.to_host
        self._send({"kind": "carry", "names": [name for name, _ in held]}, [to_host(leaf) for _, leaf in held])

    def _restore(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        backend, program, num_carry = self.execution.backend, self.execution.programs.iterate, header["num_carry"]
        leaves: dict[Any, list[Any]] = {site: [None] * num_carry for site in self.execution.topology.sites}
        for (group, r, i), array in zip(header["names"], arrays[1:], strict=True):
            leaves[group, r][i] = backend.from_host(array, program.ins[i].aval, (group, r))
        self._expect_a_sign_of_life()
        self.execution.restore(leaves, arrays[0])
        self._done()

    def _profile(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        self._send({"kind": "profile", "recorded": self.recorder.to_json()})

    def _done(self) -> None:
        self._send({"kind": "done", **self._state()})

    def _state(self) -> dict[str, Any]:
        return {"compile_seconds": getattr(self.execution.backend, "compile_seconds", 0.0)}

    def report(self, error: BaseException) -> None:
        """Tell the coordinator why this worker ends."""
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
        """The error with the number of the environment it came out of, if it does not tell: `sys.exit` does not."""
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
                _end_now()  # nobody is there to hear

    def _listen(self) -> None:
        try:
            self.control.settimeout(None)
            threading.Thread(target=self._watch, name="choreo-watch", daemon=True).start()
            while (frame := receive_frame(self.control)) is not None:
                self.commands.put(frame)
        finally:
            if not self.ending:
                _end_now()

    def _watch(self) -> None:
        """Report an environment that hangs: the main thread cannot.

        Looks are counted, not seconds: a worker that was stopped for a while does not hang. An environment that hangs and
        holds the interpreter stops this thread too; then a timer that needs no interpreter ends the process.
        """
        busy_with, looks = 0, 0
        while True:
            time.sleep(POLL_S)
            calls = 0 if self.execution is None else self.execution.host_calls()
            if not calls:
                continue
            looks = looks + 1 if calls == busy_with and calls % 2 else 0  # else another call, or none
            busy_with = calls
            if self.env_timeout_s and looks * POLL_S > self.env_timeout_s:
                self.report(self._hanging())
                _end_now()
            self._expect_a_sign_of_life()

    def _expect_a_sign_of_life(self) -> None:
        """End this process if the watching thread does not come back here in time."""
        if self.env_timeout_s and self.execution.runs_python:
            faulthandler.dump_traceback_later(self.env_timeout_s + 4 * POLL_S, exit=True)

    def _hanging(self) -> EnvError:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        lines = traceback.format_stack(frame)[-6:]
        index = self.execution.current_env()
        which = "An environment" if index is None else f"Environment {index}"
        return EnvError(
            f"{which} hangs: it has not returned for {self.env_timeout_s:g} s.\n{''.join(lines).rstrip()}",
            fix="Mend the environment, or allow it more time: --env-timeout SECONDS.",
        )


def _load(programs: bytes) -> Any:
    """What to run."""
    import cloudpickle

    try:
        return cloudpickle.loads(programs)
    except (ImportError, AttributeError) as error:
        raise RunError(
            f"What this worker is to run needs something it cannot import: {error}",
            fix="Install the module, put it beside your script, or define in the script itself what it is needed for.",
        ) from error


def _free_address(host: str) -> str:
    """Where the workers of a group can meet."""
    with socket.socket() as free:
        free.bind((host, 0))
        return f"{host}:{free.getsockname()[1]}"


def _join_collective(collective: dict[str, Any], rendezvous: str) -> None:
    """Let JAX know the devices of all workers of this group, so that they can combine values in compiled programs.

    Nothing of this is encrypted or authenticated: every port is opened at this worker's address in the group only.
    """
    import jax

    from choreo._compat import use_gloo_at
    from choreo.runtime.coordinator.cluster import is_loopback

    jax.config.update("jax_enable_recoverability", True)  # else a survivor aborts when a peer dies; we want to hear why
    jax.distributed.initialize(
        rendezvous,
        num_processes=collective["size"],
        process_id=collective["rank"],
        coordinator_bind_address=rendezvous,  # JAX's default is all interfaces
    )
    use_gloo_at(collective["address"])
    if is_loopback(collective["address"]):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")  # NCCL's default is any interface but this one


def _jax_backend(header: dict[str, Any], timed: Any) -> Any:
    import jax

    jax.config.update("jax_enable_x64", header["x64"])
    jax.config.update("jax_default_prng_impl", header["prng"])
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # who acts waits for the action anyway
    if header["num_devices"]:  # without accelerators, as many as the layout wants; with some, this changes nothing
        jax.config.update("jax_num_cpu_devices", max(header["num_devices"].values()))
    from choreo.runtime.compilation_cache import use_compilation_cache
    from choreo.runtime.engine.jax_backend import JaxBackend

    use_compilation_cache()
    return JaxBackend(header["platforms"], timed, num_devices=header["num_devices"])


def _end_now() -> None:
    """End, with all processes that environments have started: this worker leads a process group of its own."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
