"""Attacks on the ports of a run and of an agent: by strangers, by peers that know the token but send nonsense, and by a man in the
middle. Also failures of hosts, workers and agents during a run on other hosts."""

import contextlib
import itertools
import json
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import cloudpickle
import gymnasium
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import zmq

import choreo
from choreo import envs
from choreo.errors import RunError
from choreo.runtime.channels.keys import KeyPair, authenticator, show_key
from choreo.runtime.channels.sockets import Connections, context_of_process
from choreo.runtime.coordinator import launching
from choreo.runtime.coordinator.agent import AGENT, COORDINATOR, SpawnRequest
from choreo.runtime.coordinator.cluster import Cluster, ClusterError, Host
from choreo.runtime.coordinator.control_frames import WireError, receive_frame, send_frame
from choreo.runtime.coordinator.local_launcher import SocketConnection
from choreo.runtime.coordinator.remote import RemoteProcess
from choreo.runtime.coordinator.silence import Silence
from choreo.runtime.coordinator.supervision import WorkerError
from choreo.runtime.coordinator.tunnel import Tunnel
from choreo.runtime.local import Local
from faults.scenes import KEY, alone, assert_same_bits, cartpole, marked, play
from hosts import Agent, Namespace, make_token
from tiny import Carry, Tiny, Train

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""The first bytes that a ZeroMQ client sends."""
TOO_MUCH = GREETING + b"\x06" + (2**63 - 1).to_bytes(8, "big") + b"x" * 4096
"""The greeting, then a command that announces a size of 2^63 - 1 bytes."""


# These two calls open files that stay open, so they come before the first check for leaks.
context_of_process().socket(zmq.PAIR).close()
authenticator()


@pytest.fixture
def agent(tmp_path):
    with Agent(make_token(tmp_path)) as started:
        yield started


def knock(stack: ExitStack, address: str, port: int, data: bytes) -> socket.socket:
    """Connect as a stranger and send these bytes. The stack closes the connection."""
    stranger = stack.enter_context(socket.create_connection((address, port)))
    with contextlib.suppress(OSError):  # the server may have closed the connection already
        stranger.sendall(data)
    return stranger


def run_there(agent: Agent, **options):
    """Do a whole run whose two workers the agent starts: one for the environments, one for all other roles. Return the results."""
    return play(Local(cartpole("fine x1"), cluster=agent.cluster, **options))


class TestStrangers:
    """Clients that do not know the token."""

    def test_a_thousand_connections_at_once_do_not_stop_a_coordinator(self, agent):
        with ExitStack() as stack:
            rng = random.Random(0)
            for i in range(1000):
                knock(stack, agent.address, agent.port, (b"", rng.randbytes(200), GREETING, TOO_MUCH)[i % 4])
            assert_same_bits(run_there(agent), alone("fine x1"))
        assert agent.process.poll() is None

    def test_strangers_do_not_disturb_a_run(self, agent):
        """Strangers connect to all ports of all workers while the run goes on."""
        with ExitStack() as stack:

            def knock_at_all_ports():
                for process in psutil.Process(agent.process.pid).children():
                    for port in {c.laddr.port for c in process.net_connections() if c.status == psutil.CONN_LISTEN}:
                        ports.append(port)
                        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(500), GREETING, TOO_MUCH, b"x" * 10**6):
                            knock(stack, "127.0.0.1", port, data)

            ports: list[int] = []
            run = play(Local(cartpole("fine x1"), cluster=agent.cluster), after_ten=knock_at_all_ports)
        assert_same_bits(run, alone("fine x1"))
        assert len(ports) >= 2, "fewer ports than workers; each worker has a port for its coordinator"

    def test_a_coordinator_with_a_wrong_token_is_refused_with_a_reason(self, agent, tmp_path):
        (tmp_path / "other").mkdir()
        cluster = Cluster(hosts=agent.cluster.hosts, token_file=make_token(tmp_path / "other"))
        with pytest.raises(RunError) as caught:
            Local(cartpole("fine x1"), cluster=cluster)
        assert str(caught.value).startswith(
            f"The process at 127.0.0.1:{agent.port} is not an agent with the token of this cluster.\n"
            "Use the same token file on every host. Run there: choreo agent"
        )

    def test_the_error_names_an_address_without_an_agent(self, tmp_path):
        agent = Agent(make_token(tmp_path))
        agent.end()
        with pytest.raises(RunError, match=rf"There is no agent at 127.0.0.1:{agent.port}: .*refused"):
            Local(cartpole("fine x1"), cluster=agent.cluster)

    def test_a_server_that_is_not_an_agent_is_reported(self, tmp_path):
        """The server accepts connections, but sends nothing."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            host = Host(address="127.0.0.1", port=server.getsockname()[1])
            cluster = Cluster(hosts=(host,), token_file=make_token(tmp_path))
            with pytest.raises(RunError, match="does not answer like an agent"):
                Local(cartpole("fine x1"), cluster=cluster)


class TestPeersWithTheKey:
    """Clients that know the token send nonsense to the agent and to workers of their own run. A worker sends nonsense too."""

    def test_nonsense_does_not_end_an_agent(self, agent):
        rng = random.Random(1)
        request = {
            "run": "0",
            "name": "w",
            "host": "127.0.0.1",
            "key": KeyPair.new().public.decode(),
            "environment": {},
        }
        valid = json.dumps(request).encode()
        malformed = [
            b"", b"null", b"[]", b"{}", b"[" * 60_000, b"\xff\xfe", b"1" * 60_000, valid[:-1], valid + b"x",
            *(json.dumps(request | {name: value}).encode() for name in request
              for value in (None, 7, [], "\0", "\n", "x" * 50_000)),
            json.dumps(request | {"host": "no-such-host.invalid"}).encode(),
            json.dumps(request | {"environment": {"A=B": "1"}}).encode(),
            json.dumps(request | {"environment": {"": "1"}}).encode(),
            *(mutated(valid, rng) for _ in range(200)),
        ]  # fmt: skip
        with client_with_the_token(agent) as dealer:
            for data in malformed:
                dealer.send(data)
            dealer.send_multipart([b"two", b"parts"])
            dealer.send(b"x" * (1 << 20))  # this message is too long, so the agent closes the connection
        assert_same_bits(run_there(agent), alone("fine x1"))
        assert agent.process.poll() is None
        logged = agent.end()
        assert "Refused 127.0.0.1: ValueError('a request with unknown or missing fields')" in logged
        assert "Traceback" not in logged

    def test_nonsense_to_a_worker_ends_only_that_worker(self, agent):
        """Another run, whose workers the same agent started, goes on."""
        local = Local(cartpole("fine x1"), cluster=agent.cluster)

        def after_ten():
            for nonsense in (b"\xff" * 8 + b"{}", len(b"{}").to_bytes(8, "big") + b"{}", os.urandom(5000)):
                process = RemoteProcess(agent.host, agent.token.read_bytes())
                keys = KeyPair.new()
                with contextlib.closing(process):
                    process.spawn("mine", {}, run="0", keys=keys)
                    tunnel = process.connect(time.monotonic() + 60)
                    with contextlib.closing(tunnel):
                        tunnel.sendall(nonsense)
                        assert process.wait(30) is not None, "the worker did not end"

        assert_same_bits(play(local, after_ten=after_ten), alone("fine x1"))
        assert agent.process.poll() is None

    def test_nonsense_from_a_worker_ends_the_run_and_the_error_names_the_worker(self):
        local = Local(cartpole("fine x1"))
        with contextlib.closing(local):
            local.start(KEY)
            there, here = socket.socketpair()
            handle = local.pool.handles["env-0"]
            with there, contextlib.closing(handle.control):
                local.pool.stop_listening(handle)
                handle.control, handle.control_open = SocketConnection(here), True
                local.pool.listen(handle)
                there.sendall(b"\xff" * 16)
                with pytest.raises(RunError, match="announces a header of 18,446,744,073,709,551,615 bytes") as caught:
                    local.run(0, 1)
            assert caught.value.places["worker"] == "env-0"


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A copy of a request with some changed bytes. If the changed copy is still a valid request, returns no bytes instead."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    try:
        SpawnRequest.from_bytes(bytes(changed))
    except ValueError:
        return bytes(changed)
    return b""  # the agent would start a worker for a valid request


@contextlib.contextmanager
def client_with_the_token(agent: Agent):
    """A connection from a client that knows the token."""
    token = agent.token.read_bytes()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 1000)
        show_key(dealer, KeyPair.from_token(token, COORDINATOR), KeyPair.from_token(token, AGENT).public)
        connections = Connections(dealer)
        dealer.connect(f"tcp://{agent.address}:{agent.port}")
        assert connections.await_handshake(time.monotonic() + 10)
        connections.close()
        yield dealer


@pytest.mark.parametrize("data", [b"\xff" * 8, b"\0" * 7 + b"\2{]", b"\0" * 7 + b"\2{}", b"\0" * 7 + b"\1" + b"7"])
def test_bytes_that_are_not_a_frame_are_refused(data):
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data)
        with pytest.raises(WireError):
            receive_frame(here)


@pytest.mark.parametrize(
    "arrays", [[[[2**60], "float32"]], [[[-1], "float32"]], [["x", "float32"]], [[[1], "object"]], 3]
)
def test_a_header_with_impossible_arrays_is_refused(arrays):
    here, there = socket.socketpair()
    with here, there:
        text = json.dumps({"kind": "ran", "arrays": arrays}).encode()
        there.sendall(len(text).to_bytes(8, "big") + text)
        with pytest.raises(WireError, match="header of a frame is not valid"):
            receive_frame(here)
        send_frame(there, {"kind": "ran"}, [np.ones(3)])
        assert receive_frame(here)[1][0].tolist() == [1, 1, 1]


class TestManInTheMiddle:
    """An attacker between a coordinator and an agent: he relays their bytes and adds some, or takes the place of the agent."""

    def test_injected_bytes_end_the_run(self, agent):
        """Injected bytes end the connection, and are never used as data."""
        with Relay(agent.port) as relay:
            host = Host(address="127.0.0.1", port=relay.port)
            local = Local(cartpole("fine x1"), cluster=Cluster(hosts=(host,), token_file=agent.token))
            with contextlib.closing(local):
                local.start(KEY)
                relay.inject(
                    b"\x04\x20" + b"\x07MESSAGE" + bytes(24)
                )  # a frame of CURVE whose authentication tag is zero
                relay.inject(b"\x00\x05spawn")  # a frame that is not encrypted
                with pytest.raises(WorkerError):
                    for i in itertools.count():
                        local.run(i, i + 1)
        assert_same_bits(run_there(agent), alone("fine x1"))
        assert "started" in agent.end()

    def test_an_impostor_of_the_agent_receives_nothing(self, tmp_path):
        """The impostor admits every client. It has a key pair, but not the key pair of the agent."""
        with zmq.Context() as context, context.socket(zmq.ROUTER) as impostor:
            impostor.set(zmq.CURVE_SERVER, 1)
            impostor.set(zmq.CURVE_SECRETKEY, KeyPair.new().secret)
            host = Host(address="127.0.0.1", port=impostor.bind_to_random_port("tcp://127.0.0.1"))
            cluster = Cluster(hosts=(host,), token_file=make_token(tmp_path))
            with pytest.raises(RunError, match="is not an agent with the token of this cluster"):
                Local(cartpole("fine x1"), cluster=cluster)
            assert not impostor.poll(100)


def test_a_dropped_message_is_noticed():
    """CURVE does not detect a dropped message, but a tunnel numbers its messages."""
    here, there = KeyPair.new(), KeyPair.new()
    listener, port = Tunnel.listen("127.0.0.1", there, here.public)
    with Relay(port) as relay, contextlib.closing(listener):
        with contextlib.closing(
            Tunnel.connect("127.0.0.1", relay.port, here, there.public, time.monotonic() + 10)
        ) as connector:
            connector.sendall(b"first")
            assert listener.await_peer(time.monotonic() + 10)
            assert listener.recv_into(memoryview(bytearray(100))) == 5
            relay.drops = True
            connector.sendall(b"x" * 1000)
            time.sleep(0.3)
            relay.drops = False
            connector.sendall(b"third")
            listener.settimeout(10.0)
            with pytest.raises(ConnectionResetError, match="a message was left out"):
                listener.recv_into(memoryview(bytearray(100)))


class Relay:
    """Accepts connections at `port`, and relays their bytes to the port `to` and back."""

    drops = False
    """Whether to drop data that is longer than a heartbeat."""

    def __init__(self, to: int):
        self.to, self.listener = to, socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def inject(self, data: bytes) -> None:
        """Send these bytes into every connection, in both directions."""
        for each in itertools.chain(*self.pairs):
            with contextlib.suppress(OSError):
                each.sendall(data)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self.listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", self.to))
                self.pairs.append((near, far))
                for ends in ((near, far), (far, near)):
                    self.threads.append(threading.Thread(target=self._pass_on, args=ends))
                    self.threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not (self.drops and len(data) > 500):
                    target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self.listener, *itertools.chain(*self.pairs)):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self.threads:
            thread.join()


CANARIES = {
    name: f"canary-of-{name}-".encode().ljust(28, b"z")
    for name in ("factory", "observations", "parameters", "variable")
}
"""Secrets with bytes that are easy to find. The recorded network data must not contain them."""
IN_CLEAR = b"this canary flies in the open"
"""Bytes that the test sends without encryption, to check that the recorder finds them."""


def secretive(canary: str, seen: np.ndarray):
    """A class of environments with two secrets: `canary` is an attribute of the class, and `seen` is every observation."""

    class Secretive(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, seen.shape, np.float32)
        action_space = gymnasium.spaces.Discrete(2)
        secret = canary

        def reset(self, *, seed=None, options=None):
            return seen, {}

        def step(self, action):
            return seen, 1.0, False, False, {}

    return Secretive


def pattern(canary: bytes) -> np.ndarray:
    """The bytes of a canary as float32 numbers, all of which are finite."""
    return np.frombuffer(canary, np.float32)


class Marked(Tiny):
    """`Tiny` whose first weights are a canary. With a learning rate of 0, the weights do not change."""

    def init(self, env, key):
        carry = super().init(env, key)
        weights = jnp.asarray(np.tile(pattern(CANARIES["parameters"]), 2).reshape(7, 2))
        return Carry(Train(weights, carry.train.iterations), carry.position)


@pytest.mark.skipif(os.geteuid() != 0, reason="recording a network device needs root")
def test_no_secret_is_readable_on_the_network(tmp_path, monkeypatch):
    """The network data of a run on two hosts contains neither the token nor a secret key, and no canary of an environment
    variable, the factory, observations or weights."""
    variables = launching.environment_variables
    monkeypatch.setattr(
        launching, "environment_variables", lambda *args: variables(*args) | {"CANARY": CANARIES["variable"].decode()}
    )
    factory = secretive(CANARIES["factory"].decode(), pattern(CANARIES["observations"]))
    algo = Marked(unroll=4, learning_rate=0.0)
    the_plan = choreo.plan(algo, envs.from_factory(factory, 4), choreo.coarse(2))
    with Namespace() as there, Recorder(there.cable) as recorder:
        token = make_token(tmp_path)
        with Agent(token, address=there.address, port=there.port, enter=there.enter) as agent:
            hosts = (
                Host(address=there.gateway, cpus=1),
                Host(address=there.address, port=agent.port, cpus=1),
            )
            local = Local(the_plan, cluster=Cluster(hosts=hosts, token_file=token))
            with contextlib.closing(local):
                local.start(KEY)
                local.run(0, 3)
                weights = np.asarray(local.carry().train.weights)
                assert {handle.process.poll() for handle in local.pool.handles.values()} == {None}
            send_in_clear(there)
            key_there = KeyPair.from_token(token.read_bytes(), AGENT)
        recorded = recorder.stop()
    assert weights.tobytes() == 2 * CANARIES["parameters"], "the weights at the end are not the canary"
    assert len(recorded) > 20_000
    assert IN_CLEAR in recorded, "the recorder does not see the bytes on the network"
    secrets = CANARIES | {
        "token": token.read_bytes(),
        "half a token": token.read_bytes()[8:24],
        "key": key_there.secret,
    }
    assert not [name for name, canary in secrets.items() if canary in recorded or canary[4:20] in recorded]
    assert b"cloudpickle" not in recorded and b"stablehlo" not in recorded


def send_in_clear(there: Namespace) -> None:
    with socket.create_server((there.gateway, 0)) as server:
        address = (there.gateway, server.getsockname()[1])
        code = f"import socket; s = socket.create_connection({address!r}); s.sendall({IN_CLEAR!r})"
        subprocess.run([*there.enter, sys.executable, "-c", code], check=True)
        server.accept()[0].close()


class Recorder:
    """Records the TCP data that passes through a network device, as one byte string per direction of each connection."""

    def __init__(self, device: str):
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self.socket.setsockopt(
            socket.SOL_SOCKET, 33, 1 << 28
        )  # SO_RCVBUFFORCE: a buffer so large that no packet is lost
        self.socket.bind((device, 0))
        self.socket.settimeout(0.2)
        self.streams: dict[bytes, bytearray] = {}
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._record)

    def __enter__(self) -> "Recorder":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.socket.close()

    def stop(self) -> bytes:
        self.stopping.set()
        self.thread.join()
        return b"\n".join(self.streams.values())

    def _record(self) -> None:
        while not self.stopping.is_set():
            with contextlib.suppress(TimeoutError):
                packet = self.socket.recv(1 << 20)
                ip = packet[14:]
                if packet[12:14] == b"\x08\x00" and ip[9] == socket.IPPROTO_TCP:
                    tcp = ip[4 * (ip[0] & 15) : int.from_bytes(ip[2:4], "big") or None]
                    self.streams.setdefault(ip[12:20] + tcp[:4], bytearray()).extend(tcp[4 * (tcp[12] >> 4) :])


class TestFailuresOnOtherHosts:
    """The coordinator reports failures of workers on other hosts; for comparison, also one of a worker on this machine."""

    def test_the_error_shows_the_output_of_a_worker_that_cannot_start(self, tmp_path):
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(
            "import sys\nif 'choreo.runtime.worker' in sys.orig_argv: raise SystemExit('this installation is broken')"
        )
        with Agent(make_token(tmp_path), PYTHONPATH=str(tmp_path / "site")) as agent:
            with pytest.raises(RunError) as caught:
                Local(cartpole("fine x1"), cluster=agent.cluster)
        assert re.match(
            r"`env-0` on 127\.0\.0\.1 did not start: it ended with exit code 1\. Its output:\n", str(caught.value)
        )
        assert "this installation is broken" in str(caught.value)

    def test_if_one_worker_cannot_be_reached_the_other_is_ended(self, agent, monkeypatch):
        connect = RemoteProcess.connect

        def connect_to_one(process, deadline):
            if process._name != "env-0":
                process._keys = KeyPair.new()
            return connect(process, time.monotonic() + 2)

        monkeypatch.setattr(RemoteProcess, "connect", connect_to_one)
        with pytest.raises(
            RunError, match="`actor.buffer.learner` on 127.0.0.1 has started, but nobody with the worker's key"
        ):
            Local(cartpole("fine x1"), cluster=agent.cluster)
        deadline = time.monotonic() + 10
        while (left := psutil.Process(agent.process.pid).children()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left

    def test_a_cluster_with_agents_but_no_token_is_refused(self, agent):
        with pytest.raises(ClusterError, match="hosts with an agent, which asks for a token, but no token_file"):
            Local(cartpole("fine x1"), cluster=Cluster(hosts=agent.cluster.hosts))

    def test_the_error_names_a_killed_worker(self, agent):
        said = []
        local = Local(cartpole("fine x1"), cluster=agent.cluster, on_output=lambda *line: said.append(line))
        with contextlib.closing(local):
            local.start(KEY)
            os.kill(local.pool.handles["env-0"].process.pid, signal.SIGKILL)
            with pytest.raises(
                WorkerError, match=r"Worker `env-0` \(process \d+ on 127\.0\.0\.1\) was killed by SIGKILL"
            ):
                local.run(0, 100)

    @pytest.mark.parametrize("who", ["env-0", "actor+buffer+learner"])
    def test_the_error_names_a_frozen_worker(self, agent, who):
        local = Local(cartpole("fine x1"), cluster=agent.cluster, silence=Silence(dead_s=2.0))
        with contextlib.closing(local):
            local.start(KEY)
            os.kill(local.pool.handles[who].process.pid, signal.SIGSTOP)
            with pytest.raises(WorkerError) as caught:
                local.run(0, 100)
        assert str(caught.value).startswith(f"Nothing heard from `{who}` (process "), str(caught.value)
        assert " is stopped, its machine is overloaded or asleep, or its network connection is cut." in str(
            caught.value
        )

    def test_the_error_names_a_frozen_worker_on_this_machine(self):
        local = Local(cartpole("fine x1"), carrier="tcp", silence=Silence(dead_s=2.0))
        with contextlib.closing(local):
            local.start(KEY)
            os.kill(local.pool.handles["env-0"].process.pid, signal.SIGSTOP)
            with pytest.raises(WorkerError, match=r"Nothing heard from `env-0` \(process \d+\) for 2 s\."):
                local.run(0, 100)

    def test_workers_end_when_their_coordinator_is_killed(self, agent, mark, tmp_path):
        """One worker is suspended by SIGSTOP, so it cannot notice the end of the coordinator. The agent ends this worker."""
        file = tmp_path / "cluster.toml"
        file.write_text(f'token_file = "token"\n[[hosts]]\naddress = "127.0.0.1"\nport = {agent.port}\ncpus = 2\n')
        coordinator = subprocess.Popen(
            [sys.executable, "-m", "choreo", "train", "a2c", "CartPole-v1", "--layout", "fine", "--cluster", str(file),
             "--steps", "100000000", "--out", str(tmp_path / "run"), "--quiet"],
            stderr=subprocess.PIPE,
        )  # fmt: skip
        with coordinator:
            deadline = time.monotonic() + 60
            while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            workers = psutil.Process(agent.process.pid).children()
            assert len(workers) == 2
            workers[0].suspend()
            coordinator.kill()
        _, alive = psutil.wait_procs(workers, timeout=20)
        assert not alive
        logged = agent.end()
        assert re.search(
            r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  run [0-9a-f]{8} of 127.0.0.1, `env-0`: started, process \d+\.",
            logged,
            re.M,
        )
        assert re.search(r"`env-0`: its coordinator is gone\.", logged)
        assert re.search(r"`env-0`: ended with exit code -9 after \d+ s\.", logged)
        assert [line for line in marked(mark) if "choreo.runtime.worker" in line] == []


def test_workers_end_when_their_agent_is_killed(agent):
    with contextlib.closing(Local(cartpole("fine x1"), cluster=agent.cluster)) as local:
        local.start(KEY)
        workers = psutil.Process(agent.process.pid).children()
        assert len(workers) == 2
        agent.process.kill()
        with pytest.raises(
            WorkerError, match=r"Worker `.*` \(process \d+ on 127.0.0.1\) and the agent at 127.0.0.1:\d+ were lost"
        ):
            for i in itertools.count():
                local.run(i, i + 1)
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


def test_a_stopped_agent_tells_the_coordinator_and_logs_the_end_of_its_workers(agent):
    with contextlib.closing(Local(cartpole("fine x1"), cluster=agent.cluster)) as local:
        local.start(KEY)
        agent.process.send_signal(signal.SIGINT)
        with pytest.raises(WorkerError, match=r"The agent at 127.0.0.1:\d+ was stopped, and so its worker `.*` ended"):
            for i in itertools.count():
                local.run(i, i + 1)
    # The error comes before the agent has ended. `agent.end` sends another signal, which could interrupt the agent's log.
    agent.process.wait(10)
    assert agent.end().count("ended with exit code -9") == 2


@pytest.mark.parametrize("layout", ["fine x1", "coarse x2"])
def test_a_successful_run_prints_nothing(agent, layout):
    """In the log of the agent, each worker ends with exit code 0."""
    said = []
    run = play(Local(cartpole(layout), cluster=agent.cluster, on_output=lambda *line: said.append(line)))
    assert_same_bits(run, alone(layout))
    assert said == []
    deadline = time.monotonic() + 10
    while psutil.Process(agent.process.pid).children() and time.monotonic() < deadline:
        time.sleep(0.05)
    logged = agent.end()
    assert logged.count("ended with exit code 0") == logged.count(": started") > 1, logged


def test_an_agent_listens_on_loopback_unless_told_otherwise(tmp_path):
    port = 20_000 + os.getpid() % 20_000
    command = [sys.executable, "-m", "choreo", "agent", "--port", str(port), "--token-file", str(make_token(tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith(f"Waiting for coordinators at 127.0.0.1:{port}.")
        (listening,) = [c for c in psutil.Process(process.pid).net_connections() if c.status == psutil.CONN_LISTEN]
        process.terminate()
    assert listening.laddr.ip == "127.0.0.1"


@pytest.mark.parametrize("carrier", ["shm", "tcp"])
def test_files_in_the_current_folder_do_not_replace_installed_packages(tmp_path, monkeypatch, carrier):
    """For example, the current folder may be a run folder from somebody else."""
    for module in ("numpy", "json", "zmq", "cloudpickle", "choreo"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    assert_same_bits(play(Local(cartpole("fine x1"), carrier=carrier)), alone("fine x1"))


def test_the_coordinator_unpickles_nothing(monkeypatch):
    """Only workers unpickle. They reply without pickle, also when they report an error."""

    def refuse(*_):
        raise AssertionError("the coordinator unpickles")

    for module in (pickle, cloudpickle):
        monkeypatch.setattr(module, "loads", refuse)
        monkeypatch.setattr(module, "load", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    local = Local(cartpole("fine x1"))
    with contextlib.closing(local):
        local.start(KEY)
        local.run(0, 2)
        local.carry()
        os.kill(local.pool.handles["env-0"].process.pid, signal.SIGKILL)
        with pytest.raises(WorkerError):
            local.run(2, 100)
