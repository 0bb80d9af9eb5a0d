"""The common part of every batch of environments: the step token, episode totals, and checks of the environments' results.

    reset(seeds)              -> token, *obs
    step(token, *action)      -> token, *obs, reward, discount, last, *next_obs, episode_return, episode_length, *info

Every array has the env axis first. `next_obs` are the observations after the step. The next actions are chosen from `obs`, which
differs from `next_obs` where a new episode has begun. If no episode ended, `obs` and `next_obs` are the same arrays. A batch never
changes an array after returning it. The step token counts steps. A Python environment cannot return to an earlier state, so
`step` accepts only the latest token. Observations and actions are flat lists of arrays (choreo.host.spaces).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import gymnasium
import numpy as np

from choreo.errors import EnvError
from choreo.host import spaces
from choreo.host.probe import EnvForm
from choreo.host.states import NoState

Prepare = Callable[[np.ndarray], np.ndarray]
"""Converts sampled actions to the dtype of the action space, and clips them to the bounds of a Box. It always returns a copy,
because the environment may keep the array."""


class Batch:
    """The environments with the numbers `envs`; subclasses make, reset, step and close them."""

    current: int | None = None
    """The number of the environment that is running now."""

    def __init__(self, envs: range, *, name: str, form: EnvForm, info_keys: tuple[str, ...], wide: bool):
        self.envs, self.name, self.form, self.info_keys = envs, name, form, info_keys
        self.float = np.dtype(np.float64 if wide else np.float32)
        self.leaves = [
            spaces.Leaf(space, path, wide=wide) for path, space in spaces.leaves(form.observation_space, what=name)
        ]
        self.float_leaves = [k for k, leaf in enumerate(self.leaves) if leaf.dtype_out.kind == "f"]
        self.prepare = [_preparation(space) for _, space in spaces.leaves(form.action_space, what=name)]
        self.token: np.ndarray | None = None
        """The latest token."""
        self.returns = np.zeros(len(envs), self.float)
        """The sum of rewards of each running episode, in the type in which `step` returns it."""
        self.all_ones, self.all_false = np.ones(len(envs), self.float), np.zeros(len(envs), np.bool_)
        for shared in (self.all_ones, self.all_false):  # every step in which no episode ends returns these arrays
            shared.setflags(write=False)
        self.began = np.zeros(len(envs), np.int32)
        """The token at which each running episode began."""
        self.infos = [np.zeros(len(envs), self.float) for _ in self.info_keys]

    def reset(self, seeds: np.ndarray) -> tuple[np.ndarray, ...]:
        """Begin the first episode of every environment, with its seed."""
        raise NotImplementedError

    def step(self, token: np.ndarray, *action: np.ndarray) -> tuple[np.ndarray, ...]:
        """Take one step in every environment, and begin a new episode where one ended."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def state(self) -> list[Any]:
        """The state of each environment, with its totals of the running episode, as plain data.

        Raises NoState if the environments do not offer their states.
        """
        if self.token is None:
            raise NoState(f"`{self.name}` has not been reset")
        members = self.member_states()
        rows = zip(self.token.tolist(), self.began.tolist(), self.returns.tolist(), *self.infos, members, strict=True)
        return [
            {"token": token, "began": began, "return": total, "info": [float(x) for x in infos], "env": member}
            for token, began, total, *infos, member in rows
        ]

    def load(self, states: list[Any]) -> None:
        """Continue from states that the method `state` returned. The next step must get the token that these states hold."""
        token, began, returns = ([state[name] for state in states] for name in ("token", "began", "return"))
        self.load_members(
            [state["env"] for state in states], [now - then for now, then in zip(token, began, strict=True)]
        )
        self.token, self.began = np.array(token, np.int32), np.array(began, np.int32)
        self.returns = np.array(returns, self.float)
        for k in range(len(self.infos)):
            self.infos[k] = np.array([state["info"][k] for state in states], self.float)
        self.current = None

    def member_states(self) -> list[Any]:
        """The state of each environment itself, without the token and the episode totals, which the method `state` adds.

        Raises NoState if an environment does not offer its state.
        """
        raise NotImplementedError

    def load_members(self, states: list[Any], steps: list[int]) -> None:
        """Let each environment continue from its state. `steps`: the length of each running episode so far."""
        raise NotImplementedError

    def reset_results(self, obs: list[np.ndarray]) -> tuple[np.ndarray, ...]:
        """Set the episode totals to 0 and return the results of `reset`; `obs` are the first observations."""
        self.refuse_nan(obs, "reset")
        self.returns = np.zeros_like(self.returns)
        for numbers in (self.began, *self.infos):
            numbers[:] = 0
        token = np.zeros(len(self.envs), np.int32)
        self.current, self.token = None, token
        return (token, *obs)

    def check_token(self, token: np.ndarray) -> None:
        """Raise EnvError if `token` is not the latest token."""
        if token is not self.token and (self.token is None or token.tobytes() != self.token.tobytes()):
            raise self._stale_token(int(token[0]))

    def _stale_token(self, step: int) -> EnvError:
        where = f"`{self.name}` was asked to continue from step {step}, but its environments"
        if self.token is None:
            return EnvError(
                f"{where} have not been reset, and no state was loaded.",
                fix="Begin with env.reset. A run on Python environments cannot be resumed; begin a new run with its weights "
                "(--init-from).",
            )
        return EnvError(
            f"{where} have taken {self.token[0]} steps. A Python environment cannot go back to an earlier state.",
            fix="Begin with env.reset, use each state once, and use an environment in one run at a time.",
        )

    def step_results(
        self,
        token: np.ndarray,
        next_obs: list[np.ndarray],
        reward: np.ndarray,
        ended: Sequence[int],
        terminal: Sequence[int],
        restart: Callable[[list[np.ndarray]], None],
    ) -> tuple[np.ndarray, ...]:
        """Update the episode totals, begin new episodes and return the results of `step`.

        `ended` are the indices of the environments whose episode ended. `terminal` are the indices of the environments whose
        episode ended by termination. `restart` is called with the arrays of observations, and writes the first observations of
        the new episodes into these arrays.
        """
        self.refuse_nan(next_obs, "step")
        if math.isnan(reward.dot(reward)):
            self.wrong(int(np.isnan(reward).argmax()), "step", "NaN as its reward")
        returns = self.returns = self.returns + reward
        # The token overflows after 2**31 steps. This is harmless, because tokens are only compared and subtracted.
        token = self.token = token + 1
        totals = [returns, token - self.began, *(values.copy() for values in self.infos)]
        obs, discount, last = next_obs, self.all_ones, self.all_false
        if ended:
            self.returns = returns.copy()
            obs, discount, last = [leaf.copy() for leaf in next_obs], discount.copy(), last.copy()
            for i in terminal:
                discount[i] = 0
            for i in ended:
                last[i], self.returns[i], self.began[i] = True, 0, token[i]
                for values in self.infos:
                    values[i] = 0
            restart(obs)
            self.refuse_nan(obs, "reset")
        self.current = None
        return (token, *obs, reward, discount, last, *next_obs, *totals)

    def refuse_nan(self, obs: list[np.ndarray], method: str) -> None:
        """Raise EnvError if an observation from the method `method` contains NaN."""
        for k in self.float_leaves:
            leaf = obs[k]
            # The sum of squares is NaN if and only if one of the numbers is NaN. This is the fastest check.
            if math.isnan(np.vdot(leaf, leaf)):
                bad = np.isnan(leaf.reshape(len(leaf), -1)).any(axis=1)
                self.wrong(int(bad.argmax()), method, "NaN in its observation")

    def wrong(self, i: int, method: str, what: str) -> NoReturn:
        """Raise EnvError: environment `i` of this batch returned `what` from its method `method`."""
        raise EnvError(
            f"`{method}` of environment {self.envs.start + i} of `{self.name}` returned {what}.",
            fix="Correct the environment, or wrap it in one that converts its results.",
        )


def _preparation(space: gymnasium.Space) -> Prepare:
    dtype = np.dtype(space.dtype)
    if isinstance(space, gymnasium.spaces.Box):
        low, high = space.low, space.high
        return lambda action: np.minimum(np.maximum(action, low), high).astype(dtype, copy=False)
    return lambda action: action.astype(dtype)
