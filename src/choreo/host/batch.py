"""What every block of environments does besides stepping: tokens, totals of episodes, and checks of what came back.

    reset(seeds)              -> token, *obs
    step(token, *action)      -> token, *obs, reward, discount, last, *next_obs, episode_return, episode_length, *info

Every array has the env axis first and is never written again; `obs` and `next_obs` are the same arrays where no episode
ended. The token counts steps: an environment cannot go back to a state it has left, so a step from any but the latest is
refused. Observations and actions are flat (choreo.host.spaces).
"""

import math
from collections.abc import Callable, Sequence
from typing import NoReturn

import gymnasium
import numpy as np

from choreo.errors import EnvError
from choreo.host import spaces
from choreo.host.probe import EnvForm

Prepare = Callable[[np.ndarray], np.ndarray]
"""From actions as they were sampled to such of a space: always a copy, which an environment may keep."""


class Batch:
    """The environments `envs` of all; subclasses make, reset, step and close them."""

    current: int | None = None
    """The number of the environment that is being worked on."""

    def __init__(self, envs: range, *, name: str, form: EnvForm, info_keys: tuple[str, ...], wide: bool):
        self.envs, self.name, self.form, self.info_keys = envs, name, form, info_keys
        self.float = np.dtype(np.float64 if wide else np.float32)
        self.leaves = [
            spaces.Leaf(space, path, wide=wide) for path, space in spaces.leaves(form.observation_space, what=name)
        ]
        self.float_leaves = [k for k, leaf in enumerate(self.leaves) if leaf.dtype_out.kind == "f"]
        self.prepare = [_preparation(leaf) for _, leaf in spaces.leaves(form.action_space, what=name)]
        self.token: np.ndarray | None = None
        """The latest one."""
        # In our type, so that what is handed out is a copy and no conversion.
        self.returns = np.zeros(len(envs), self.float)
        self.ones, self.nowhere = np.ones(len(envs), self.float), np.zeros(len(envs), np.bool_)
        for shared in (self.ones, self.nowhere):  # handed out in every step in which no episode ends
            shared.setflags(write=False)
        self.began = np.zeros(len(envs), np.int32)
        """The token with which the running episode began."""
        self.infos = [np.zeros(len(envs), self.float) for _ in self.info_keys]

    def reset(self, seeds: np.ndarray) -> tuple[np.ndarray, ...]:
        """Begin the first episode of every environment, from its seed."""
        raise NotImplementedError

    def step(self, token: np.ndarray, *action: np.ndarray) -> tuple[np.ndarray, ...]:
        """One step of every environment, and a new episode where one ended."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def begun(self, obs: list[np.ndarray]) -> tuple[np.ndarray, ...]:
        """What `reset` returns."""
        self.refuse_nan(obs, "reset")
        self.returns = np.zeros_like(self.returns)
        for totals in (self.began, *self.infos):
            totals[:] = 0
        token = np.zeros(len(self.envs), np.int32)
        self.current, self.token = None, token
        return (token, *obs)

    def check_token(self, token: np.ndarray) -> None:
        if token is not self.token and (self.token is None or token.tobytes() != self.token.tobytes()):
            raise self._no_way_back(int(token[0]))

    def _no_way_back(self, step: int) -> EnvError:
        where = f"`{self.name}` was to go on from step {step}, but its environments"
        if self.token is None:
            return EnvError(
                f"{where} have not been reset: a Python environment cannot be put into a state.",
                fix="Begin with env.reset. A run on such environments cannot be resumed; begin a new one with its weights "
                "(--init-from).",
            )
        return EnvError(
            f"{where} have taken {self.token[0]} steps: a Python environment cannot go back to a state it has left.",
            fix="Begin with env.reset, use each state once, and play one run at a time with an environment.",
        )

    def stepped(
        self,
        token: np.ndarray,
        next_obs: list[np.ndarray],
        reward: np.ndarray,
        ended: Sequence[int],
        terminal: Sequence[int],
        restart: Callable[[list[np.ndarray]], None],
    ) -> tuple[np.ndarray, ...]:
        """What `step` returns; `restart` writes the first observations of new episodes over those of `ended` ones."""
        self.refuse_nan(next_obs, "step")
        if math.isnan(reward.dot(reward)):
            self.wrong(int(np.isnan(reward).argmax()), "step", "NaN as reward")
        returns = self.returns = self.returns + reward
        token = self.token = token + 1  # wraps after 2**31 steps, which does no harm
        totals = [returns, token - self.began, *(values.copy() for values in self.infos)]
        obs, discount, last = next_obs, self.ones, self.nowhere
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

    def refuse_nan(self, obs: list[np.ndarray], part: str) -> None:
        for k in self.float_leaves:
            leaf = obs[k]
            # A sum of squares is NaN only if one of them is; this is the fastest way to see every number.
            if math.isnan(np.vdot(leaf, leaf)):
                bad = np.isnan(leaf.reshape(len(leaf), -1)).any(axis=1)
                self.wrong(int(bad.argmax()), part, "NaN in its observation")

    def wrong(self, i: int, part: str, what: str) -> NoReturn:
        raise EnvError(
            f"Environment {self.envs.start + i} of `{self.name}` returned in {part} {what}.",
            fix="Correct the environment, or wrap it in one that converts what it returns.",
        )


def _preparation(space: gymnasium.Space) -> Prepare:
    dtype = np.dtype(space.dtype)
    if isinstance(space, gymnasium.spaces.Box):
        low, high = space.low, space.high
        return lambda action: np.minimum(np.maximum(action, low), high).astype(dtype, copy=False)
    return lambda action: action.astype(dtype)
