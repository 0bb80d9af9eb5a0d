"""One worker: a process that runs the sites it is told to, until its coordinator says stop or is gone.

Started as `python -m choreo.worker FD`, where FD is a socket to the coordinator. It never traces and never imports the
user's main: what it runs arrives as compiled programs, and host environments by value.

    brief      who I am, who lives where, how to reach them, what to run         -> ready
    start      two random keys                                                   -> done
    run        iterations first .. stop - 1                                      -> ran, with metrics
    carry      what my sites hold of the carry                                   -> carry
    restore    hold this instead                                                 -> done
    stop       close the environments, and end

A second thread listens: it hears at once when the coordinator is gone, and notices when an environment hangs.
"""

import faulthandler
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

from choreo.errors import ChoreoError, EnvError
from choreo.runtime.links import Links
from choreo.runtime.wire import Frame, receive_frame, send_frame

POLL_S = 0.5
"""How often the listening thread looks for an environment that hangs."""


def main() -> int:
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to hear
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    worker = Worker(control)
    try:
        worker.serve()
    except BaseException as error:  # noqa: BLE001  whatever it is, the coordinator must hear of it
        worker.report(error)
        return 1
    return 0


class Worker:
    """The main thread's side."""

    def __init__(self, control: socket.socket):
        self.control, self.name = control, "worker"
        self.commands: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self.sending = threading.Lock()
        self.execution: Any = None
        self.recorder: Any = None
        self.links: Links | None = None
        self.env_timeout_s = 0.0
        threading.Thread(target=self._listen, name="choreo-control", daemon=True).start()

    def serve(self) -> None:
        while True:
            header, arrays = self.commands.get()
            kind = header["kind"]
            if kind == "stop":
                if self.execution is not None:
                    self.execution.close()
                if self.links is not None:
                    self.links.close()
                return
            getattr(self, f"_{kind}")(header, arrays)

    def _brief(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        began = time.perf_counter()
        self.name, self.env_timeout_s = header["name"], header["env_timeout_s"]
        self.links = Links(self.name, header["links"], token=bytes.fromhex(header["token"]))
        if self.links.address:
            self._send({"kind": "listening", "address": self.links.address})
            book, _ = self.commands.get()
            assert book["kind"] == "addresses", book
            self.links.connect(book["addresses"])
        import cloudpickle

        from choreo.runtime.execution import Execution
        from choreo.runtime.machine import Neighbourhood, PythonOnly

        orders = cloudpickle.loads(arrays[0].tobytes())
        homes = {(group, r): home for group, r, home in header["homes"]}
        hood = Neighbourhood(me=self.name, homes=homes, links=self.links.by_peer)
        if header["profile"]:
            from choreo.runtime.profile import Recorder

            self.recorder = Recorder()
        watch = self.recorder and self.recorder.watch
        backend = _device(header, watch) if header["compiled"] else PythonOnly()
        self.execution = Execution(orders, hood, backend, watch)
        self._send({"kind": "ready", "seconds": time.perf_counter() - began})

    def _start(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        self.execution.start(*arrays)
        self._done()

    def _run(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        metrics = self.execution.run(header["first"], header["stop"])
        names = [[*site, name] for site, values in metrics.items() for name in values]
        values = [value for values in metrics.values() for value in values.values()]
        self._send({"kind": "ran", "names": names, **self._state()}, values)

    def _carry(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        held = [((*site, i), leaf) for site, leaves in self.execution.leaves.items()
                for i, leaf in enumerate(leaves) if leaf is not None]  # fmt: skip
        to_host = self.execution.backend.to_host
        self._send({"kind": "carry", "names": [name for name, _ in held]}, [to_host(leaf) for _, leaf in held])

    def _restore(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        backend, program, num_carry = self.execution.backend, self.execution.orders.iterate, header["num_carry"]
        leaves: dict[Any, list[Any]] = {site: [None] * num_carry for site in self.execution.hood.sites}
        for (group, r, i), array in zip(header["names"], arrays[1:], strict=True):
            leaves[group, r][i] = backend.from_host(array, program.ins[i].aval, group)
        self.execution.restore(leaves, arrays[0])
        self._done()

    def _profile(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        self._send({"kind": "profile", "taken": self.recorder.take()})

    def _done(self) -> None:
        self._send({"kind": "done", **self._state()})

    def _state(self) -> dict[str, Any]:
        return {"compile_seconds": getattr(self.execution.backend, "compile_seconds", 0.0)}

    def report(self, error: BaseException) -> None:
        """Tell the coordinator why this worker ends."""
        text = "".join(traceback.format_exception(error))
        known = isinstance(error, ChoreoError)
        self._send({
            "kind": "error",
            "type": type(error).__name__,
            "what": error.what if known else str(error),
            "fix": error.fix if known else None,
            "places": error.places if known else {},
            "traceback": text,
        })  # fmt: skip

    def _send(self, header: dict[str, Any], arrays: Any = ()) -> None:
        with self.sending:
            try:
                send_frame(self.control, header, arrays)
            except OSError:
                _end_now()  # nobody is there to hear

    def _listen(self) -> None:
        self.control.settimeout(None)
        threading.Thread(target=self._watch, name="choreo-watch", daemon=True).start()
        while (frame := receive_frame(self.control)) is not None:
            self.commands.put(frame)
        _end_now()

    def _watch(self) -> None:
        """Report an environment that hangs: the main thread cannot."""
        busy_with, since = None, 0.0
        while True:
            time.sleep(POLL_S)
            if self.execution is None or not self.env_timeout_s:
                continue
            calls = self.execution.host_calls()
            if calls != busy_with or calls % 2 == 0:  # another call, or none
                busy_with, since = calls, time.monotonic()
            elif time.monotonic() - since > self.env_timeout_s:
                self.report(self._hanging())
                _end_now()

    def _hanging(self) -> EnvError:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        lines = traceback.format_stack(frame)[-6:]
        index = self.execution.current_env()
        which = "An environment" if index is None else f"Environment {index}"
        return EnvError(
            f"{which} hangs: it has not returned for {self.env_timeout_s:g} s.\n{''.join(lines).rstrip()}",
            fix="Mend the environment, or allow it more time: --env-timeout SECONDS.",
        )


def _device(header: dict[str, Any], watch: Any) -> Any:
    import jax

    jax.config.update("jax_enable_x64", header["x64"])
    jax.config.update("jax_default_prng_impl", header["prng"])
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # who acts waits for the action anyway
    from choreo.cache import use_compilation_cache
    from choreo.runtime.device import Device

    use_compilation_cache()
    return Device(header["compiled"], watch)


def _end_now() -> None:
    """End, with all processes that environments have started: this worker leads a process group of its own."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
