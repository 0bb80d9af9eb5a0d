"""What a worker tells about its main thread when the coordinator asks whether the worker is alive.

A second thread of the worker looks at the stack of the main thread, so that this costs the main thread no time. The innermost
function of Choreo on the stack says what the main thread does:

    function in ...           activity        meaning
    queue of commands         idle            the main thread waits for the coordinator
    channels                  waiting         the main thread waits for another worker
    backend, iteration loop   computing       XLA compiles or runs a program
    all others                python          an environment, a host fragment, an import, or Choreo itself runs
"""

import traceback
from types import FrameType
from typing import Literal, TypeAlias

Activity: TypeAlias = Literal["idle", "waiting", "computing", "python"]
"""What a main thread does."""
COMPUTING = ("choreo.runtime.engine.jax_backend", "choreo.runtime.engine.iteration_loop")
STACK_LINES = 8
"""How many calls of a stack are shown, from the innermost outwards."""


def activity(frame: FrameType | None) -> Activity:
    """What a thread does. `frame` is the innermost frame of the thread."""
    # Compare names of functions: the worker's module has the name `__main__`, because `python -m` runs it as a script.
    if frame is not None and frame.f_code.co_qualname in ("Worker.serve", "Worker._next"):
        return "idle"
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("choreo.runtime.channels."):
            return "waiting"
        if module.startswith("choreo."):
            return "computing" if module in COMPUTING else "python"
        frame = frame.f_back
    return "python"


def stack_text(frame: FrameType) -> str:
    """The innermost calls of a stack, the innermost one last, each with file, line and code."""
    return "".join(traceback.format_stack(frame)[-STACK_LINES:]).rstrip()
