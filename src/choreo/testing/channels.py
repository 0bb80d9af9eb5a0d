"""`check_channel`: test whether an implementation of channels keeps the contract in `choreo.runtime.channels.base`.

    from choreo.testing import check_channel
    check_channel(make)        # returns None, or raises a ChannelError that says how the channel breaks the contract

`make(slot_bytes, slots=, timeout_s=)` returns a connected pair `(sender, receiver)` in this process. Tests that use
both ends at the same time run in threads. The death of a process is not tested.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from choreo.dtypes import EXTENDED, NUMPY, dtype_named
from choreo.runtime.channels.base import (
    ChannelClosed,
    ChannelError,
    ChannelTimeout,
    EndOfChannel,
    MessageMismatch,
    PeerLost,
    Receiver,
    ReceiverClosed,
    Sender,
    message_bytes,
)
from choreo.runtime.channels.waiting import wait_for_any

PATIENCE_S = 20.0
"""After this time, a call that should have returned counts as hanging."""


@runtime_checkable
class MakeChannel(Protocol):
    """A function that makes a connected pair (sender, receiver)."""

    def __call__(self, slot_bytes: int, *, slots: int, timeout_s: float | None) -> tuple[Sender, Receiver]: ...


def check_channel(make: MakeChannel) -> None:
    """Send messages through new channels, and end the channels in every way; raise ChannelError if a result breaks the contract."""
    check_parts(make)
    check_messages(make)
    check_order(make)
    check_bound(make)
    check_timeout(make)
    check_finish(make)
    check_receiver_closed(make)
    check_closed(make)
    check_failure(make)
    check_mismatch(make)
    check_statistics(make)
    check_wait_for_any(make)


def check_parts(make: MakeChannel) -> None:
    """Check that both ends have every part and name their peer."""
    for end, kind in zip(_pair(make), (Sender, Receiver), strict=True):
        _require(isinstance(end, kind), f"`{type(end).__name__}` lacks a part of {kind.__name__}.")
        _require(isinstance(end.peer, str) and bool(end.peer), f"the {kind.__name__.lower()} does not name its peer.")
        end.close()


def check_messages(make: MakeChannel) -> None:
    """Check that arrays of every type, shape and stride arrive bit for bit, and that no other memory is overwritten."""
    for what, arrays in MESSAGES.items():
        sender, receiver = _pair(make, arrays, timeout_s=PATIENCE_S)
        with sender, receiver:
            for _ in range(3):  # more messages than slots
                batches = [np.full((3, *a.shape, 2), b"\xa5" * a.dtype.itemsize, _raw(a)) for a in arrays]
                _together(partial(sender.send, arrays), partial(receiver.receive, _inside(batches, arrays)))
                for array, batch in zip(arrays, batches, strict=True):
                    _require(_same(_inside([batch], [array])[0], array), f"{what} do not arrive as they were sent.")
                    _inside([batch], [array])[0].view(_raw(array))[...] = b"\xa5" * array.dtype.itemsize
                    untouched = (batch == np.full_like(batch, b"\xa5" * array.dtype.itemsize)).all()
                    _require(bool(untouched), f"receiving {what} writes outside of the array that was given.")


def check_order(make: MakeChannel) -> None:
    """Check that messages arrive in order, each once, and that an array may be reused as soon as `send` returns."""
    count = 200
    sender, receiver = _pair(make, [np.zeros(8, np.int64)], timeout_s=PATIENCE_S)
    arrived = []

    def send_all() -> None:
        array = np.zeros(8, np.int64)
        for i in range(count):
            array[...] = i
            sender.send([array])
            array[...] = -1

    def receive_all() -> None:
        for _ in range(count):
            array = np.zeros(8, np.int64)
            receiver.receive([array])
            arrived.append(array.copy())

    with sender, receiver:
        _together(send_all, receive_all)
    _require(all((a == a[0]).all() and a[0] >= 0 for a in arrived), "`send` returns before it has copied the message.")
    _require([int(a[0]) for a in arrived] == list(range(count)), "messages do not arrive in order, each once.")


def check_bound(make: MakeChannel) -> None:
    """Check the back-pressure: while `slots` messages are unread, `send` waits."""
    for slots in (1, 2, 5):
        sender, receiver = _pair(make, slots=slots, timeout_s=0.1)
        with sender, receiver:
            for i in range(slots):
                sender.send([_number(i)])
            _expect(ChannelTimeout, "`send` when all slots are unread", sender.send, [_number(slots)])
            _require(_receive(receiver) == 0, "the first message is not the first to arrive.")
            sender.send([_number(slots)])
            arrived = [_receive(receiver) for _ in range(slots)]
            _require(arrived == list(range(1, slots + 1)), "a `send` that timed out changes the messages that arrive.")
    sender, receiver = _pair(make, slots=1)
    with sender, receiver:
        sender.send([_number(0)])
        arrived = []
        _together(lambda: sender.send([_number(1)]), lambda: arrived.extend(_receive(receiver) for _ in range(2)))
        _require(arrived == [0, 1], "a `send` that had to wait sends a wrong message.")


def check_timeout(make: MakeChannel) -> None:
    """Check that `receive` times out after `timeout_s`, and that the channel works afterwards."""
    sender, receiver = _pair(make, timeout_s=0.1)
    with sender, receiver:
        for i in range(3):
            error = _expect(ChannelTimeout, "`receive` when nothing comes", _receive, receiver)
            _require(error.peer == receiver.peer, "the time-out does not name the peer.")
            sender.send([_number(i)])
            _require(_receive(receiver) == i, "after a time-out, a wrong message arrives.")


def check_finish(make: MakeChannel) -> None:
    """Check that after `sender.close()` all sent messages can be read, and that each further `receive` raises EndOfChannel."""
    sender, receiver = _pair(make, slots=2)
    with receiver:
        sender.send([_number(0)])
        sender.send([_number(1)])
        sender.close()
        arrived: list[int] = []
        for _ in range(2):
            _expect(EndOfChannel, "`receive` after the last message", _drain, receiver, arrived)
        _require(arrived == [0, 1], "closing the sender drops messages that it had sent.")
    sender, receiver = _pair(make)
    with receiver:  # here, `receive` is already waiting when the sender closes
        _together(sender.close, partial(_expect, EndOfChannel, "a waiting `receive`", _receive, receiver))


def check_receiver_closed(make: MakeChannel) -> None:
    """Check that `send` raises ReceiverClosed after the receiver closed.

    At most `slots` messages can still be sent then. A `send` that is already waiting must raise too.
    """
    sender, receiver = _pair(make, slots=2)
    with sender:
        receiver.close()
        for _ in range(2):
            error = _expect(ReceiverClosed, "`send` after the receiver closed", _send, sender, 3)
            _require(error.peer == sender.peer, "ReceiverClosed does not name the peer.")
    sender, receiver = _pair(make, slots=2)
    with sender:
        _send(sender, 2)
        _together(partial(_expect, ReceiverClosed, "a waiting `send`", _send, sender, 1), receiver.close)


def check_closed(make: MakeChannel) -> None:
    """Check that using a closed end raises ChannelClosed, and that closing twice is allowed."""
    sender, receiver = _pair(make)
    for end in (sender, receiver):
        end.close()
        end.close()
    _expect(ChannelClosed, "`send` after `close`", _send, sender, 1)
    _expect(ChannelClosed, "`receive` after `close`", _receive, receiver)


def check_failure(make: MakeChannel) -> None:
    """Check that one end raises PeerLost after an exception has ended the `with` statement of the other end."""
    sender, receiver = _pair(make, slots=2)
    with receiver:
        _fail(sender)
        arrived: list[int] = []
        error = _expect(PeerLost, "`receive` after the sender failed", _drain, receiver, arrived)
        _require(arrived in ([], [0]), "after a failure, a message arrives that was not sent before it.")
        _require(error.peer == receiver.peer, "PeerLost does not name the peer.")
    sender, receiver = _pair(make, slots=2)
    with sender:
        _fail(receiver)
        error = _expect(PeerLost, "`send` after the receiver failed", _send, sender, 3)
        _require(error.peer == sender.peer, "PeerLost does not name the peer.")


def check_mismatch(make: MakeChannel) -> None:
    """Check that `receive` raises MessageMismatch if the message is larger or smaller than the receiver expects."""
    for sent, expected in ((4, 5), (5, 4)):
        sender, receiver = _pair(make, [np.zeros(5, np.float32)])
        with sender, receiver:
            sender.send([np.zeros(sent, np.float32)])
            into = [np.zeros(expected, np.float32)]
            error = _expect(MessageMismatch, "`receive` of a message of another size", receiver.receive, into)
            _require(error.peer == receiver.peer, "MessageMismatch does not name the peer.")


def check_wait_for_any(make: MakeChannel) -> None:
    """Check that `wait_for_any` returns when one of several senders sends, and when one has finished; no message is missed."""
    count, pairs = 100, [_pair(make, slots=1, timeout_s=PATIENCE_S) for _ in range(2)]
    receivers = [receiver for _, receiver in pairs]
    arrived: list[list[int]] = [[], []]

    def send_all(sender: Sender) -> None:
        for i in range(count):
            sender.send([_number(i)])
        sender.close()

    def receive_all() -> None:
        open_ends = {0, 1}
        while open_ends:
            wait_for_any([receivers[i] for i in sorted(open_ends)])
            for i in [i for i in sorted(open_ends) if receivers[i].ready()]:
                try:
                    arrived[i].append(_receive(receivers[i]))
                except EndOfChannel:
                    open_ends.remove(i)

    with receivers[0], receivers[1]:
        _together(receive_all, *(partial(send_all, sender) for sender, _ in pairs))
    _require(arrived == [list(range(count))] * 2, "while a process waits for any of two channels, messages are missed.")
    (sender, receiver), (silent, quiet) = (_pair(make, timeout_s=PATIENCE_S) for _ in range(2))
    with receiver, quiet, silent:  # the sender fails while the receiver waits
        _together(partial(wait_for_any, [quiet, receiver]), partial(_fail, sender))
        _expect(PeerLost, "`receive` after the sender failed", _drain, receiver, [])


def check_statistics(make: MakeChannel) -> None:
    """Check that both ends count messages and bytes, and that the receiver counts its waiting time."""
    arrays = [np.zeros((3, 4), np.float32), np.zeros(5, bool)]  # 53 bytes
    sender, receiver = _pair(make, arrays, slots=2, timeout_s=0.1)
    with sender, receiver:
        for _ in range(3):
            sender.send(arrays)
            receiver.receive(arrays)
        for end in (sender, receiver):
            seen = end.statistics()
            _require(
                (seen.messages, seen.bytes) == (3, 3 * 53),
                f"statistics count {seen.messages} messages and {seen.bytes} bytes, not 3 messages and {3 * 53} bytes.",
            )
        before = receiver.statistics()
        _expect(ChannelTimeout, "`receive` when nothing comes", receiver.receive, arrays)
        after = receiver.statistics()
        _require(after.wait_s - before.wait_s > 0.05 and after.waits > before.waits, "statistics do not count waiting.")
        _require(after.messages == 3, "statistics count a message that never came.")
    _require(sender.statistics().messages == 3, "statistics are lost when the channel is closed.")


def _strided(dtype: Any) -> list[np.ndarray]:
    base = np.arange(4 * 6 * 10).reshape(4, 6, 10).astype(dtype)
    return [
        base[:, ::2],
        base[::-1, 1],
        base.transpose(2, 0, 1),
        base[1:3, :, 4:5],
        np.broadcast_to(base[0, 0], (3, 10)),
    ]


MESSAGES: dict[str, list[np.ndarray]] = {
    "numbers of every type": [np.arange(6).astype(dtype_named(name)) for name in NUMPY],
    "numbers of every type that JAX has and numpy lacks": [
        np.arange(6, dtype=np.float32).astype(dtype_named(name)) for name in EXTENDED
    ],
    "NaN, infinity and negative zero": [np.array([np.nan, -np.inf, -0.0, 1e-45], t) for t in ("f4", "f8")],
    "arrays without elements": [np.zeros(0, np.float32), np.zeros((3, 0, 2), np.int32), np.ones(2, np.uint8)],
    "arrays without axes": [np.array(1.5, np.float32), np.array(True), np.array(7, np.uint8)],
    "a message without arrays": [],
    "strided views of floats": _strided(np.float32),
    "strided views of bytes": _strided(np.uint8),
    "large strided views": [np.arange(1 << 18, dtype=np.float32).reshape(512, 512)[:, ::2].T],
    "large arrays": [
        np.arange(1 << 18, dtype=np.float64),
        np.ones((3, 1), np.int8),
        np.arange(1 << 16, dtype=np.uint8),
    ],
}
"""The messages of `check_messages`, each with a description."""


class _Failure(Exception):
    """The exception with which `_fail` ends a `with` statement."""


def _pair(
    make: MakeChannel, arrays: Sequence[np.ndarray] = (np.zeros(8),), *, slots: int = 2, timeout_s: float | None = None
) -> tuple[Sender, Receiver]:
    return make(message_bytes(arrays), slots=slots, timeout_s=timeout_s)


def _number(i: int) -> np.ndarray:
    return np.array([i], np.int64)


def _send(sender: Sender, count: int) -> None:
    for i in range(count):
        sender.send([_number(i)])


def _drain(receiver: Receiver, arrived: list[int]) -> None:
    while True:
        arrived.append(_receive(receiver))


def _fail(end: Sender | Receiver) -> None:
    """End the `with` statement of an end by an exception; a sender sends one message first."""
    try:
        with end:
            if isinstance(end, Sender):
                _send(end, 1)
            raise _Failure
    except _Failure:
        return


def _receive(receiver: Receiver) -> int:
    array = _number(-1)
    receiver.receive([array])
    return int(array[0])


def _raw(array: np.ndarray) -> np.dtype:
    return np.dtype(f"V{array.dtype.itemsize}")


def _inside(batches: Sequence[np.ndarray], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The views into which a message is received: every second element in the middle row of each batch."""
    return [
        batch[1, ..., 0].view(a.dtype) if a.ndim else batch[1, 0:1].view(a.dtype)[0, ...]
        for batch, a in zip(batches, arrays, strict=True)
    ]


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _together(*calls: Callable[[], Any]) -> None:
    """Run all calls at the same time, each in a thread; raise an error if one call raises or does not return."""
    errors: list[BaseException] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 (raised again below)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        _require(
            not thread.is_alive() or bool(errors),
            "a call does not return, although the other end makes the matching call.",
        )
    if errors:
        raise errors[0]


def _expect(kind: type[ChannelError], what: str, call: Callable[..., Any], *args: Any) -> ChannelError:
    """Return the error that `call` raises, which must be a `kind`. The call runs in a thread: a broken channel may wait forever."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 (checked below)
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    _require(not thread.is_alive(), f"{what} does not return; it should raise {kind.__name__}.")
    _require(bool(raised), f"{what} raises nothing; it should raise {kind.__name__}.")
    error = raised[0]
    if not isinstance(error, kind):
        raise ChannelError(
            f"The channel breaks its contract: {what} raises {type(error).__name__}, not {kind.__name__}."
        ) from error
    return error


def _require(ok: bool, broken: str) -> None:
    if not ok:
        raise ChannelError(
            f"The channel breaks its contract: {broken}", fix="See choreo.runtime.channels.base for the contract."
        )
