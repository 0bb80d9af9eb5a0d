"""The coordinator's decisions, without processes and without a real clock: every event in every stage, and whole failures."""

import itertools
import typing

import pytest

from choreo.runtime.coordinator.machine_events import (
    Announce,
    AskForHeartBeat,
    CommandSent,
    ConnectionClosed,
    CutOff,
    EndedEarly,
    FellSilent,
    HeartBeat,
    KillAll,
    MachineEvent,
    OutOfReach,
    ProcessEnded,
    RaiseError,
    RepliesAwaited,
    SendStop,
    ShowState,
    TimePassed,
    ToldToStop,
    TooLate,
    UnexpectedReply,
    WorkerHeard,
    WorkerReplied,
    WorkerReported,
    WorkerStarted,
)
from choreo.runtime.coordinator.silence import Silence
from choreo.runtime.coordinator.state_machine import GRACE_S, LAST_WORDS_S, STORY_LENGTH, Stage, StateMachine

LOST_A_PEER = {"type": "PeerLost", "what": "`b` was lost", "places": {"peer": "b"}}
RAISED = {"type": "EnvError", "what": "Environment 3 raised", "places": {}}
SILENCE = Silence(dead_s=100.0)
LAST = SILENCE.dead_s


class Scene:
    """A state machine with the workers `a` and `b`, and a time that only the test moves forward."""

    def __init__(self, *, collectives: bool = False):
        self.machine, self.now = StateMachine(SILENCE), 1000.0
        for name in "ab":
            self.give(WorkerStarted(worker=name, uses_collectives=collectives))

    def give(self, event: MachineEvent, *, after_s: float = 0.0) -> list:
        self.now += after_s
        return self.machine.handle(event, now=self.now)

    def wait(self, seconds: float, *, step_s: float = 0.5) -> list:
        """Let time pass in small steps, as the pool does; return all commands."""
        return [c for _ in range(round(seconds / step_s)) for c in self.give(TimePassed(), after_s=step_s)]

    def run(self, *events: MachineEvent) -> list:
        return [command for event in events for command in self.give(event)]


def ask(scene: Scene) -> None:
    """Both workers have replied once, and get a new command."""
    for name in "ab":
        scene.run(CommandSent(worker=name, kind="set_up"), WorkerReplied(worker=name, kind="ready"))
    scene.run(*(CommandSent(worker=name, kind="run") for name in "ab"), RepliesAwaited(doing="iterations 0 to 9"))


def in_stage(stage: Stage) -> Scene:
    scene = Scene()
    match stage:
        case Stage.WAITING:
            ask(scene)
        case Stage.SEARCHING:
            ask(scene)
            scene.give(WorkerReported(worker="a", report=LOST_A_PEER))
        case Stage.STOPPING:
            scene.give(ToldToStop())
        case Stage.OVER:
            scene.run(ToldToStop(), ToldToStop())
            scene.wait(GRACE_S)
    assert scene.machine.stage is stage
    return scene


EVENTS: dict[str, MachineEvent] = {
    "started": WorkerStarted(worker="c"),
    "sent": CommandSent(worker="b", kind="carry"),
    "awaited": RepliesAwaited(doing="iterations", timeout_s=60.0),
    "replied": WorkerReplied(worker="b", kind="ran"),
    "heard": WorkerHeard(worker="b"),
    "beat": HeartBeat(worker="b", moves=7, doing="computing"),
    "reported": WorkerReported(worker="b", report=RAISED),
    "closed": ConnectionClosed(worker="b"),
    "ended": ProcessEnded(worker="b", code=-9),
    "lost": OutOfReach(worker="b", why="The agent was stopped.", fix="Start it."),
    "tick": TimePassed(),
    "stop": ToldToStop(),
}
IDLE, WAITING, SEARCHING, STOPPING, OVER = Stage
BUSY, FREE = ShowState(worker="b", state="carry"), ShowState(worker="b", state="idle")
TABLE: dict[tuple[Stage, str], tuple[Stage, list]] = {
    # No worker executes a command.
    (IDLE, "started"): (IDLE, []),
    (IDLE, "sent"): (WAITING, [BUSY]),
    (IDLE, "awaited"): (IDLE, []),
    (IDLE, "replied"): (OVER, [KillAll(), RaiseError(failure=UnexpectedReply(worker="b", kind="ran"))]),
    (IDLE, "heard"): (IDLE, []),
    (IDLE, "beat"): (IDLE, []),
    (IDLE, "reported"): (SEARCHING, []),
    (IDLE, "closed"): (SEARCHING, []),
    (IDLE, "ended"): (SEARCHING, []),
    (IDLE, "lost"): (SEARCHING, []),
    (IDLE, "tick"): (IDLE, []),
    (IDLE, "stop"): (STOPPING, [SendStop()]),
    # Both workers execute a command.
    (WAITING, "started"): (WAITING, []),
    (WAITING, "sent"): (WAITING, [BUSY]),
    (WAITING, "awaited"): (WAITING, []),
    (WAITING, "replied"): (WAITING, [FREE]),
    (WAITING, "heard"): (WAITING, []),
    (WAITING, "beat"): (WAITING, []),
    (WAITING, "reported"): (SEARCHING, []),
    (WAITING, "closed"): (SEARCHING, []),
    (WAITING, "ended"): (SEARCHING, []),
    (WAITING, "lost"): (SEARCHING, []),
    (WAITING, "tick"): (WAITING, []),
    (WAITING, "stop"): (STOPPING, [SendStop()]),
    # `a` has lost its peer `b`; nothing is known about `b`.
    (SEARCHING, "started"): (SEARCHING, []),
    (SEARCHING, "sent"): (SEARCHING, [BUSY]),
    (SEARCHING, "awaited"): (SEARCHING, []),
    (SEARCHING, "replied"): (SEARCHING, [FREE]),
    (SEARCHING, "heard"): (SEARCHING, []),
    (SEARCHING, "beat"): (SEARCHING, []),
    (SEARCHING, "reported"): (SEARCHING, []),  # the process still runs: its last output may follow
    (SEARCHING, "closed"): (SEARCHING, []),  # the exit code of the process is not known yet
    (SEARCHING, "ended"): (SEARCHING, []),  # the report of the worker may follow
    (SEARCHING, "lost"): (SEARCHING, []),
    (SEARCHING, "tick"): (SEARCHING, []),
    (SEARCHING, "stop"): (OVER, [KillAll()]),
    # Both workers were told to stop.
    (STOPPING, "started"): (STOPPING, []),
    (STOPPING, "sent"): (STOPPING, [BUSY]),
    (STOPPING, "awaited"): (STOPPING, []),
    (STOPPING, "replied"): (STOPPING, []),
    (STOPPING, "heard"): (STOPPING, []),
    (STOPPING, "beat"): (STOPPING, []),
    (STOPPING, "reported"): (STOPPING, []),
    (STOPPING, "closed"): (STOPPING, []),
    (STOPPING, "ended"): (STOPPING, []),
    (STOPPING, "lost"): (STOPPING, []),
    (STOPPING, "tick"): (STOPPING, []),
    (STOPPING, "stop"): (STOPPING, []),
    # The run is over: no event has an effect.
    **{(OVER, event): (OVER, []) for event in EVENTS},
}


def test_the_table_has_every_event_in_every_stage():
    assert set(TABLE) == set(itertools.product(Stage, EVENTS))
    assert {type(event) for event in EVENTS.values()} == set(typing.get_args(MachineEvent))


@pytest.mark.parametrize(("stage", "event"), TABLE, ids=[f"{stage.value}-{event}" for stage, event in TABLE])
def test_each_event_in_each_stage(stage, event):
    scene, (after, commands) = in_stage(stage), TABLE[stage, event]
    assert scene.give(EVENTS[event]) == commands
    assert scene.machine.stage is after


class TestReplies:
    def test_the_last_reply_ends_the_wait(self):
        scene = in_stage(WAITING)
        scene.give(WorkerReplied(worker="a", kind="ran"))
        assert scene.machine.stage is WAITING
        scene.give(WorkerReplied(worker="b", kind="ran"))
        assert scene.machine.stage is IDLE

    def test_a_second_reply_to_one_command_ends_the_run(self):
        """Otherwise the machine would take the second reply as the reply to the next command."""
        scene = in_stage(WAITING)
        scene.give(WorkerReplied(worker="a", kind="ran"))
        failure = UnexpectedReply(worker="a", kind="ran")
        assert scene.give(WorkerReplied(worker="a", kind="ran")) == [KillAll(), RaiseError(failure=failure)]

    def test_workers_that_reply_too_late_are_named(self):
        scene = Scene()
        scene.run(*(CommandSent(worker=name, kind="versions") for name in "ab"))
        scene.run(RepliesAwaited(doing="starting", timeout_s=120.0), WorkerReplied(worker="a", kind="versions"))
        assert scene.wait(119.5) == []
        failure = TooLate(workers=("b",), doing="starting", timeout_s=120.0)
        assert scene.wait(0.5) == [KillAll(), RaiseError(failure=failure)]

    def test_a_deadline_ends_with_the_last_reply(self):
        scene = Scene()
        scene.give(CommandSent(worker="a", kind="versions"))
        scene.run(RepliesAwaited(doing="starting", timeout_s=5.0), WorkerReplied(worker="a", kind="versions"))
        assert scene.wait(60.0) == []


class TestWhoFailedFirst:
    """The error is about the first worker that ended for a reason other than a lost peer."""

    def failure(self, scene: Scene, commands: list):
        assert commands[:1] == [KillAll()] and isinstance(commands[1], RaiseError) and scene.machine.stage is OVER
        return commands[1].failure

    def test_a_worker_with_an_exit_code_and_no_report(self):
        scene = in_stage(WAITING)
        assert scene.give(ConnectionClosed(worker="b")) == []
        failure = self.failure(scene, scene.give(ProcessEnded(worker="b", code=-9)))
        assert failure == EndedEarly(worker="b", code=-9, report=None, out_of_reach=None)

    def test_the_exit_code_may_come_before_the_end_of_the_connection(self):
        scene = in_stage(WAITING)
        assert scene.give(ProcessEnded(worker="b", code=3)) == []
        assert self.failure(scene, scene.give(ConnectionClosed(worker="b"))).code == 3

    def test_a_report_may_come_after_the_exit_code(self):
        scene = in_stage(WAITING)
        scene.give(ProcessEnded(worker="b", code=1))
        assert self.failure(scene, scene.give(WorkerReported(worker="b", report=RAISED))).report == RAISED

    def test_a_process_whose_child_keeps_the_connection_open(self):
        scene = in_stage(WAITING)
        scene.give(ProcessEnded(worker="b", code=-9))
        assert scene.wait(LAST_WORDS_S - 0.5) == []
        assert self.failure(scene, scene.wait(0.5)).code == -9

    def test_the_peer_that_reports_first_is_not_blamed(self):
        scene = in_stage(SEARCHING)
        scene.give(ConnectionClosed(worker="b"))
        failure = self.failure(scene, scene.give(ProcessEnded(worker="b", code=-9)))
        assert (failure.worker, failure.code) == ("b", -9)

    @pytest.mark.parametrize("error", ["PeerLost", "ReceiverClosed", "EndOfChannel"])
    def test_errors_of_channels_are_consequences(self, error):
        scene = in_stage(WAITING)
        scene.give(WorkerReported(worker="a", report=LOST_A_PEER | {"type": error}))
        scene.give(WorkerReported(worker="b", report=RAISED))
        assert self.failure(scene, scene.give(ProcessEnded(worker="b", code=1))).worker == "b"

    def test_a_reporting_worker_that_does_not_end(self):
        """The machine waits at most LAST_WORDS_S for the rest of the worker's output, and then raises the error."""
        scene = in_stage(WAITING)
        assert scene.give(WorkerReported(worker="b", report=RAISED)) == []
        assert self.failure(scene, scene.wait(LAST_WORDS_S)).report == RAISED

    def test_two_workers_that_lost_each_other_were_cut_off(self):
        scene = in_stage(SEARCHING)
        assert scene.wait(GRACE_S - 0.5) == []
        assert self.failure(scene, scene.wait(0.5)) == CutOff(worker="a", peer="b")

    def test_if_all_have_lost_a_peer_the_first_is_shown(self):
        scene = in_stage(SEARCHING)
        scene.give(WorkerReported(worker="b", report=LOST_A_PEER | {"places": {"peer": "a"}}))
        assert self.failure(scene, scene.wait(GRACE_S)).worker == "a"

    @pytest.mark.parametrize("what", ["Gloo all-reduce failed", "NCCL error", "lost the coordination service"])
    def test_errors_of_collectives_are_consequences(self, what):
        scene = Scene(collectives=True)
        ask(scene)
        scene.give(WorkerReported(worker="a", report={"type": "XlaRuntimeError", "what": what, "places": {}}))
        scene.give(ConnectionClosed(worker="b"))
        assert self.failure(scene, scene.give(ProcessEnded(worker="b", code=-9))).worker == "b"

    def test_a_worker_that_jax_has_aborted_is_a_consequence(self):
        scene = Scene(collectives=True)
        ask(scene)
        for name, code in (("a", -6), ("b", -9)):
            scene.give(ConnectionClosed(worker=name))
            commands = scene.give(ProcessEnded(worker=name, code=code))
        assert self.failure(scene, commands).worker == "b"

    def test_without_collectives_an_abort_is_a_cause(self):
        scene = in_stage(WAITING)
        scene.give(ConnectionClosed(worker="a"))
        assert self.failure(scene, scene.give(ProcessEnded(worker="a", code=-6))).worker == "a"

    def test_a_lost_agent_is_a_cause(self):
        scene, lost = in_stage(WAITING), EVENTS["lost"]
        scene.give(lost)
        failure = self.failure(scene, scene.give(ConnectionClosed(worker="b")))
        assert failure == EndedEarly(worker="b", code=None, report=None, out_of_reach=lost)


class TestSilence:
    """A worker without heartbeats is named, and later counts as dead. A worker with heartbeats never counts as dead."""

    def beat(self, scene: Scene, name: str, *, moves: int = 0, doing: str = "python", stack: str = "") -> list:
        return scene.give(HeartBeat(worker=name, moves=moves, doing=doing, stack=stack))

    def live(self, scene: Scene, seconds: float, *, answer: str, doing: str = "computing", moves=None):
        """Let time pass while the workers in `answer` answer each question; return all commands except questions."""
        commands, moves = [], moves or itertools.repeat(0)
        for _ in range(round(seconds / 0.5)):
            found = scene.wait(0.5)
            for question in [c for c in found if isinstance(c, AskForHeartBeat)]:
                if question.worker in answer:
                    stack = "line 7" if question.stack else ""
                    found += self.beat(scene, question.worker, moves=next(moves), doing=doing, stack=stack)
            commands += [c for c in found if not isinstance(c, AskForHeartBeat)]
        return commands

    def test_a_silent_worker_is_asked_then_named_then_dead(self):
        scene = in_stage(WAITING)
        assert scene.wait(1.5) == []
        assert scene.wait(0.5) == [AskForHeartBeat(worker="a"), AskForHeartBeat(worker="b")]
        self.beat(scene, "a")
        assert self.live(scene, 7.5, answer="a") == []
        named = [
            Announce(worker="b", line="nothing heard from `b` for 10 s"),
            ShowState(worker="b", state="silent"),
        ]
        assert self.live(scene, 0.5, answer="a") == named
        assert self.live(scene, LAST - 10.5, answer="a") == []
        failure = FellSilent(worker="b", seconds=LAST)
        assert self.live(scene, 0.5, answer="a") == [KillAll(), RaiseError(failure=failure)]

    def test_a_worker_that_answers_again_is_announced_once(self):
        scene = in_stage(WAITING)
        self.live(scene, 40.0, answer="a")
        assert self.beat(scene, "b") == [
            Announce(worker="b", line="heard from `b` again after 40 s"),
            ShowState(worker="b", state="run"),
        ]
        assert self.live(scene, 3 * LAST, answer="ab") == []

    def test_only_one_question_at_a_time_is_open(self):
        """A stopped process reads nothing, so more questions would only fill its socket."""
        scene = in_stage(WAITING)
        asked = [c for c in scene.wait(LAST - 1.0) if isinstance(c, AskForHeartBeat)]
        assert sorted(c.worker for c in asked) == ["a", "b"]

    def test_an_idle_worker_is_not_asked(self):
        scene = in_stage(WAITING)
        scene.give(WorkerReplied(worker="b", kind="ran"))
        assert {c.worker for c in scene.wait(9.0)} == {"a"}

    def test_a_worker_that_is_starting_is_not_silent(self):
        """While a worker starts, the time limits of the steps of the start apply instead."""
        scene = Scene()
        scene.run(CommandSent(worker="a", kind="versions"), RepliesAwaited(doing="starting", timeout_s=2 * LAST))
        assert scene.wait(2 * LAST - 0.5) == []

    def test_time_in_which_the_coordinator_did_not_listen_does_not_count(self):
        """For example, the coordinator itself was stopped, or it evaluated the policy."""
        scene = in_stage(WAITING)
        scene.wait(9.0)
        assert scene.give(TimePassed(), after_s=10 * LAST) == []
        assert [c.worker for c in scene.wait(1.0) if isinstance(c, Announce)] == ["a", "b"]

    @pytest.mark.parametrize("doing", ["computing", "idle"])
    def test_compiling_and_a_long_update_are_progress(self, doing):
        assert self.live(in_stage(WAITING), 5 * LAST, answer="ab", doing=doing) == []

    def test_a_main_thread_that_moves_makes_progress(self):
        assert self.live(in_stage(WAITING), 5 * LAST, answer="ab", doing="python", moves=itertools.count()) == []

    def test_a_main_thread_that_does_not_move_is_named_with_its_stack_and_is_not_dead(self):
        scene = in_stage(WAITING)
        commands = self.live(scene, 5 * LAST, answer="ab", doing="python")
        assert [(c.worker, c.line.partition(" has")[0]) for c in commands] == [
            ("a", "`a` answers, but"), ("b", "`b` answers, but")]  # fmt: skip
        assert all(c.line.endswith(" s:\nline 7") for c in commands)
        assert scene.machine.stage is WAITING

    def test_a_worker_that_waits_for_a_busy_worker_is_not_named(self):
        scene = in_stage(WAITING)
        for _ in range(100):
            scene.wait(2.0)
            said = self.beat(scene, "a", doing="waiting", stack="line 7")
            said += self.beat(scene, "b", doing="computing", stack="line 8")
            assert said == []

    def test_workers_that_all_wait_for_each_other_are_named(self):
        scene = in_stage(WAITING)
        named = self.live(scene, 60.0, answer="ab", doing="waiting")
        assert [c.worker for c in named] == ["a", "b"]


class TestStopping:
    def test_all_workers_end_in_time(self):
        scene = in_stage(STOPPING)
        assert scene.give(ProcessEnded(worker="a", code=0)) == []
        assert scene.give(ProcessEnded(worker="b", code=0)) == [KillAll()]
        assert scene.machine.stage is OVER

    def test_a_worker_whose_agent_is_lost_counts_as_ended(self):
        scene = in_stage(STOPPING)
        scene.give(ProcessEnded(worker="a", code=0))
        assert scene.give(EVENTS["lost"]) == [KillAll()]

    def test_workers_that_do_not_end_are_killed(self):
        scene = in_stage(STOPPING)
        assert scene.wait(GRACE_S - 0.5) == []
        assert scene.wait(0.5) == [KillAll()]


class TestStory:
    def test_the_story_has_events_and_commands_with_times(self):
        scene = in_stage(WAITING)
        scene.give(ConnectionClosed(worker="b"), after_s=1.5)
        scene.give(ProcessEnded(worker="b", code=-9), after_s=0.25)
        assert scene.machine.story().splitlines()[-4:] == [
            "    -0.25 s  ConnectionClosed b",
            "     0.00 s  ProcessEnded b -9",
            "     0.00 s  KillAll",
            "     0.00 s  RaiseError EndedEarly",
        ]

    def test_the_story_is_bounded_and_leaves_out_what_comes_all_the_time(self):
        scene = in_stage(WAITING)
        before = scene.machine.story()
        TestSilence().live(scene, 50.0, answer="ab", moves=itertools.count())
        assert scene.machine.story().count("\n") == before.count("\n")
        for _ in range(100):
            scene.give(CommandSent(worker="a", kind="run"))
            scene.give(WorkerReplied(worker="a", kind="ran"))
        assert len(scene.machine.story().splitlines()) == STORY_LENGTH
