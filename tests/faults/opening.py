"""Opens changed copies of run folders, and reports forbidden events, such as a new process or a write to another folder.

    python opening.py SCRATCH load:1 replay:60        `load` every changed copy, `replay` every 60th changed copy

This script needs a separate process, because an audit hook cannot be removed. SCRATCH holds the folders `ppo` and `gym`, which
`make_folders` has made. Each case changes one thing in a copy of a folder: a string or a table of run.toml becomes one of
`payloads`, the whole run.toml becomes deeply nested, or a link, a pipe or a folder takes the place of a file. The script prints
one JSON object: the number of opened cases, and the findings.
"""

import contextlib
import functools
import io
import itertools
import json
import os
import re
import shutil
import site
import sys
import sysconfig
import tomllib
import traceback
from pathlib import Path
from typing import Any

import tomli_w

COMMANDS = ("load", "compare", "graph", "evaluate", "resume", "replay", "train")
"""From the fastest to the slowest."""
IGNORED = ("versions", "layout.fields.name")
"""Entries of run.toml that can be any text. If one of them is changed, a command succeeds, and most commands then take
seconds. Only `load` and `compare`, which are fast, try these cases."""
FILES = (
    "run.toml",
    "metrics.jsonl",
    "reads.jsonl",
    "summary.json",
    "checkpoint.safetensors",
    ".lock",
    "graph.svg",
    "curve.png",
)
EVIL = "import os\nopen(os.environ['CANARY'], 'w').close()\nmake = x = Algo = os.system\n"
"""Code that must never run. It would make the file whose path is in the environment variable CANARY."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
STARTS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "pty.spawn",
)
"""Audit events that start a process."""
CHANGES = (
    "os.remove",
    "os.rename",
    "os.link",
    "os.symlink",
    "os.mkdir",
    "os.rmdir",
    "os.truncate",
    "os.chmod",
    "os.chown",
)
"""Audit events that change the file system."""
REACHES = ("socket.connect", "socket.bind", "socket.getaddrinfo", "ctypes.dlopen", "webbrowser.open", "urllib.Request")
"""Audit events that use the network or load a library."""


def make_folders(scratch: Path) -> None:
    """Make the folders of two small runs, and files with code that must never run."""
    import choreo
    from choreo import networks

    network = functools.partial(networks.mlp, hidden=(4,))
    ppo = choreo.PPO(unroll=4, minibatch_size=8, epochs=1, network=network)
    options: dict[str, Any] = {"num_envs": 2, "progress": False}
    choreo.train(ppo, "jax:CartPole-v1", steps=8, out=scratch / "first", **options)
    ppo_run = {"steps": 16, "out": scratch / "ppo", "runtime": "inprocess", "init_from": scratch / "first"}
    choreo.train(ppo, "jax:CartPole-v1", **ppo_run, **options)
    a2c = choreo.A2C(unroll=4, network=network)
    env = choreo.envs.make("CartPole-v1", 2, max_episode_steps=20)
    choreo.train(a2c, env, steps=16, out=scratch / "gym", progress=False)
    for name in ("evil.py", "evil_module.py", "gymnax:evil.py"):
        (scratch / name).write_text(EVIL)
    (scratch / "evil.xml").write_text("<mujoco/>")


def payloads(scratch: Path) -> list[Any]:
    """Values that an attacker might write in place of a string or a table."""
    touch = f"touch {scratch}/CANARY"
    popen = {"class": "subprocess:Popen", "fields": {"args": touch, "shell": True}}
    env = {"name": "CartPole-v1", "num_envs": 2}
    return [
        # Code, as text.
        "subprocess:Popen", "os:system", "evil.py:x", "./evil.py:x", f"{scratch}/evil.py:x", "evil_module:Id-v0",
        "evil_module:make", "gymnasium:evil_module:Id-v0", "gymnax:evil.py:x", "GymV26Environment-v0", "this:s", touch,
        # Code, as tables.
        popen, {"name": "os:system"}, {"class": "evil_module:Algo"}, {"name": f"{scratch}/evil.py:x"},
        {"name": "evil_module:make", "num_envs": 2}, {"name": "evil_module:Id-v0", "num_envs": 2},
        {"name": "os:system", "num_envs": 2, "kwargs": {"command": touch}},
        {"partial": {"name": "os:system"}, "args": [touch], "kwargs": {}},
        {"partial": {"name": "mlp"}, "args": [], "kwargs": {"hidden": popen}},
        {"class": "ppo", "fields": {"network": {"name": "evil_module:make"}}},
        {"class": "VmapEnv", "fields": {"env": popen, "num_envs": 2}},
        {"tuple": [popen]}, {"dict": {"x": popen}},
        # Arguments of environments.
        env | {"kwargs": {"xml_file": f"{scratch}/evil.xml"}}, env | {"kwargs": {"env_id": "evil_module:Id-v0"}},
        env | {"kwargs": {"entry_point": "evil_module:make"}}, env | {"kwargs": {"render_mode": {"name": "os:system"}}},
        env | {"kwargs": {"num_envs": 3}}, env | {"kwargs": {"id": "evil_module:Id-v0"}}, env | {"kwargs": {"wrappers": [popen]}},
        {"name": "Ant-v5", "num_envs": 2, "kwargs": {"xml_file": "./evil.xml"}},
        {"name": "GymV26Environment-v0", "num_envs": 2, "kwargs": {"env_id": "evil_module:Id-v0"}},
        # Weights from elsewhere.
        {"path": str(scratch / "gym"), "params_hash": "0"}, {"path": "/dev", "params_hash": "0"},
        # Data of the wrong kind.
        {"class": "Layout"}, {"class": "ppo"}, {"name": "ppo"}, {"name": "optax.adam"}, {"class": "mlp"}, {"class": ["ppo"]},
        {"class": "sac", "fields": "unroll"}, {"partial": {"name": "mlp"}, "args": [], "kwargs": {"hidden": "wide"}},
        {"partial": {"name": "squashed"}, "args": [], "kwargs": {}}, {"name": ["CartPole-v1"], "num_envs": "2"},
        env | {"num_envs": "x"}, env | {"num_envs": 0}, env | {"kwargs": "x"}, {"tuple": [1]}, {"none": True}, {},
        # Control characters for a terminal.
        "\x1b]0;title\x07", "\u202egnp.exe", {"\x1b[2J": "x"},
    ]  # fmt: skip


def positions(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of every string and every table in TOML data."""
    if isinstance(data, dict):
        return [path] * bool(path) + [at for name, value in data.items() for at in positions(value, (*path, name))]
    if isinstance(data, list):
        return [at for index, value in enumerate(data) for at in positions(value, (*path, index))]
    return [path] * isinstance(data, str)


def replaced(data: Any, path: tuple[Any, ...], payload: Any) -> Any:
    if not path:
        return payload
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[path[0]] = replaced(data[path[0]], path[1:], payload)
    return copy


def changes(scratch: Path) -> list[tuple[str, str, Any]]:
    """For each case: the folder, a description of the change, and the function that makes the change."""
    found = []
    for folder in ("ppo", "gym"):
        data = tomllib.loads((scratch / folder / "run.toml").read_text())
        tables = (
            ("run", "algorithm", "environment", "layout") if folder == "ppo" else ("environment",)
        )  # the changes of the other tables are tested with the folder `ppo`
        places = [path for path in positions(data) if path[0] in tables or path == ("versions", "jax")]
        for path, payload in itertools.product(places, payloads(scratch)):
            text = tomli_w.dumps(replaced(data, path, payload))
            write = functools.partial(_write, text=text)
            found.append((folder, f"{'.'.join(map(str, path))} = {payload!r}", write))
        for file, kind in itertools.product((*FILES, "tensorboard"), ("link", "dangling", "hard", "pipe", "folder")):
            found.append(
                (folder, f"{file} is a {kind}", functools.partial(_plant, name=file, kind=kind, scratch=scratch))
            )
        part = f".metrics.jsonl.{os.getpid()}.part"
        found.append(
            (folder, "a link as part file", functools.partial(_plant, name=part, kind="link", scratch=scratch))
        )
        nested = "x = " + "[" * 100_000 + "]" * 100_000
        found.append((folder, "deeply nested", functools.partial(_write, text=nested)))
    return found


def _write(folder: Path, *, text: str) -> None:
    (folder / "run.toml").write_text(text)


def _plant(folder: Path, *, name: str, kind: str, scratch: Path) -> None:
    file = folder / name
    file.unlink(missing_ok=True)
    elsewhere = scratch / "elsewhere" / ("gone" if kind == "dangling" else "victim")
    if kind == "hard":
        os.link(elsewhere, file)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to(elsewhere)


class Watch:
    """The audit hook. While `case` is set, the hook records forbidden events, and refuses events that start a process."""

    def __init__(self):
        self.case: str | None = None
        self.allowed: Path | None = None
        self.seen: list[str] = []
        own = Path(__import__("choreo").__file__).parent
        roots = [*site.getsitepackages(), sysconfig.get_path("stdlib"), sys.prefix, str(own)]
        self.code = tuple(os.path.realpath(root) for root in roots)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.case is None:
            return
        case, self.case = self.case, None  # events inside of this hook are not recorded
        try:
            if (what := self._forbidden(event, args)) is not None:
                self.seen.append(what)
                if event in STARTS:
                    raise PermissionError(f"refused by the audit hook: {what}")
        finally:
            self.case = case

    def _forbidden(self, event: str, args: tuple[Any, ...]) -> str | None:
        if event in STARTS or event in REACHES:
            return f"{event} {args[0]!r}"
        if event == "import" and args[0] not in sys.modules:
            return f"import {args[0]}"
        if event == "exec":
            file = getattr(args[0], "co_filename", "?")
            inside = file.startswith("<") or os.path.realpath(file).startswith(self.code)
            return None if inside else f"exec {file}"
        if event == "open" and args[2] & WRITES and not self._may_write(args[0], bool(args[2] & os.O_NOFOLLOW)):
            return f"open for writing {args[0]}"
        if event in CHANGES and not all(self._may_write(path, True) for path in args if isinstance(path, str | Path)):
            return f"{event} {args}"
        return None

    def _may_write(self, path: Any, nofollow: bool) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return True  # a file descriptor: the hook has checked the call that opened it
        path = os.path.abspath(os.fsdecode(path))
        real = (
            os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            if nofollow
            else os.path.realpath(path)
        )
        return path == os.devnull or Path(real).is_relative_to(self.allowed or "/nowhere")


def open_folder(command: str, folder: Path) -> str:
    """Run one command; return its output."""
    import choreo
    from choreo.cli.main import main

    run, output = str(folder), io.StringIO()
    out = folder.parent / "out"
    commands = {
        "compare": ["compare", run, run],
        "graph": ["graph", f"{run}/run.toml"],
        "evaluate": ["evaluate", run, "--episodes", "1"],
        "resume": ["resume", run, "--steps", "24", "--quiet", "--logger", "tensorboard"],
        "replay": ["replay", run, "--quiet"],
        "train": ["train", f"{run}/run.toml", "--steps", "8", "--out", str(out), "--quiet"],
    }
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        if command == "load":
            try:
                choreo.load(run)
            except choreo.errors.ChoreoError as error:
                print(error)
        else:
            main(commands[command])
    return output.getvalue()


def main() -> None:
    scratch, commands = Path(sys.argv[1]), {name: int(step) for name, step in (arg.split(":") for arg in sys.argv[2:])}
    os.chdir(scratch)
    # As with `python -m choreo`, modules in the current folder can be imported.
    sys.path.insert(0, str(scratch))
    os.environ["CANARY"] = str(scratch / "CANARY")
    for command in commands:  # without the hook: open unchanged copies, to import the modules that every folder needs
        for folder in ("ppo", "gym"):
            _open_copy(scratch, folder, command, lambda folder: None, None)
    watch, wrong, count = Watch(), [], 0
    sys.addaudithook(watch)
    every = changes(scratch)
    for command, step in commands.items():
        cases = every if command in ("load", "compare") else [case for case in every if not case[1].startswith(IGNORED)]
        for folder, what, change in cases[::step]:
            watch.case, watch.seen, known = f"{command} {folder}: {what}", [], set(sys.modules)
            said = _open_copy(scratch, folder, command, change, watch)
            watch.case, count = None, count + 1
            said += [f"{file} was made" for file in ("CANARY", "elsewhere/gone") if (scratch / file).exists()]
            if (scratch / "elsewhere" / "victim").read_bytes() != b"precious":
                said.append("the victim was changed")
            said += [f"{module} was imported" for module in set(sys.modules) - known]
            if watch.seen or said:
                wrong.append([f"{command} {folder}: {what}", *watch.seen, *said])
            (scratch / "CANARY").unlink(missing_ok=True)
            for module in [name for name in sys.modules if name == "this" or "evil" in name]:
                del sys.modules[module]
    print(json.dumps({"count": count, "wrong": wrong}))


def _open_copy(scratch: Path, folder: str, command: str, change: Any, watch: Watch | None) -> list[str]:
    """Open a changed copy of a folder; return the findings: an unexpected exception, or control characters in the output."""
    case, where = watch and watch.case, scratch / "case"
    if watch is not None:
        watch.case = None
    shutil.rmtree(where, ignore_errors=True)
    shutil.rmtree(scratch / "elsewhere", ignore_errors=True)
    (scratch / "elsewhere").mkdir()
    (scratch / "elsewhere" / "victim").write_bytes(b"precious")
    copy = Path(shutil.copytree(scratch / folder, where / "run"))
    change(copy)
    if watch is not None:
        watch.allowed, watch.case = where, case
    try:
        said = open_folder(command, copy)
    except Exception as error:  # noqa: BLE001 - `open_folder` handles ChoreoError; any other error is a finding
        if watch is not None:
            watch.case = None
        last = traceback.extract_tb(error.__traceback__)[-1]
        return [f"{type(error).__name__}: {error} at {last.filename}:{last.lineno}"]
    finally:
        if watch is not None:
            watch.case = None
    return [f"printed {raw!r}" for raw in re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", said)[:1]]


if __name__ == "__main__":
    main()
