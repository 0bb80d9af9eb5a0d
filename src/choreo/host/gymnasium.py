"""A block of Gymnasium environments, stepped one after the other.

    MakeBatch(source=..., form=probe(source))(range(4, 8))  ->  GymBatch: environments 4, 5, 6, 7

An environment resets itself in the step that ends its episode: from a seed the first time, from its own stream later.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from choreo.errors import EnvError
from choreo.host import spaces
from choreo.host.batch import Batch, Prepare
from choreo.host.env_errors import describe, env_raised
from choreo.host.probe import MASK, EnvForm
from choreo.host.sources import Source


class GymBatch(Batch):
    """The environments `envs` of all, made now."""

    def __init__(self, envs: range, source: Source, *, form: EnvForm, info_keys: tuple[str, ...], wide: bool):
        super().__init__(envs, name=source.name, form=form, info_keys=info_keys, wide=wide)
        self.is_tree = isinstance(self.form.observation_space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple)
        self.each = _each(self.form.action_space, self.prepare, len(envs))
        self.members: list[gymnasium.Env] = []
        try:
            for self.current in envs:
                self.members.append(source.make())
        except BaseException:
            self.close()
            raise
        self.current = None
        self.steps: list[Callable[[Any], Any]] = [env.step for env in self.members]
        self.count = 0
        """Steps taken."""
        self.due = [math.inf] * len(envs)
        """The count at which each episode is cut off."""
        self.first_due = math.inf

    def reset(self, seeds: np.ndarray) -> tuple[np.ndarray, ...]:
        return self.begun(self._stack([self._begin_episode(i, seed) for i, seed in enumerate(seeds.tolist())], "reset"))

    def step(self, token: np.ndarray, *action: np.ndarray) -> tuple[np.ndarray, ...]:
        self.check_token(token)
        actions = self.each(action)
        results = []
        try:
            for self.current, step, one in zip(self.envs, self.steps, actions, strict=True):  # noqa: B020
                results.append(step(one))
        except (Exception, SystemExit) as error:
            raise env_raised(self.name, f"Environment {self.current}", "step", error) from error
        try:
            seen, rewards, terminated, truncated, infos = zip(*results, strict=True)
            over = any(terminated) or any(truncated)
        except (TypeError, ValueError) as error:
            raise self._malformed(results) from error
        self.count += 1
        ended, terminal = [], []
        if over or self.count >= self.first_due:
            terminal = [i for i, is_terminal in enumerate(terminated) if is_terminal]
            ended = [i for i, due in enumerate(self.due) if terminated[i] or truncated[i] or self.count >= due]
        if self.form.masked:
            seen = [self._masked(obs, info, i, "step") for i, (obs, info) in enumerate(zip(seen, infos, strict=True))]
        if self.info_keys:
            for i, info in enumerate(infos):
                self._note(i, info)

        def restart(obs: list[np.ndarray]) -> None:
            fresh = self._stack([self._begin_episode(i, None) for i in ended], "reset", ended)
            for leaf, new in zip(obs, fresh, strict=True):
                leaf[ended] = new

        return self.stepped(token, self._stack(seen, "step"), self._rewards(rewards), ended, terminal, restart)

    def close(self) -> None:
        while self.members:
            self.members.pop().close()

    def _begin_episode(self, i: int, seed: int | None) -> Any:
        """The first observation."""
        self.current = self.envs.start + i
        try:
            result = self.members[i].reset(seed=seed)
        except (Exception, SystemExit) as error:
            raise env_raised(self.name, f"Environment {self.current}", "reset", error) from error
        if not isinstance(result, tuple) or len(result) != 2:
            self.wrong(i, "reset", f"{describe(result)}, not (obs, info)")
        self.steps[i], limit = _bare_step(self.members[i])
        self.due[i] = self.count + limit
        self.first_due = min(self.due)
        return self._masked(*result, i, "reset") if self.form.masked else result[0]

    def _masked(self, seen: Any, info: dict[str, Any], i: int, part: str) -> dict[str, Any]:
        if MASK not in info:
            self.wrong(i, part, f"an observation without info[{MASK!r}], which its first reset had")
        return {"obs": seen, MASK: info[MASK]}

    def _malformed(self, results: list[Any]) -> EnvError:
        """The first of these results that is not what `step` should return."""
        for i, result in enumerate(results):
            if not isinstance(result, tuple) or len(result) != 5:
                self.wrong(i, "step", f"{describe(result)}, not (obs, reward, terminated, truncated, info)")
            for name, value in zip(("terminated", "truncated"), result[2:4], strict=True):
                if np.ndim(value):
                    self.wrong(i, "step", f"{describe(value)} as {name}, not a truth value")
        raise AssertionError("one of them is")

    def _stack(self, seen: Sequence[Any], part: str, which: Sequence[int] | None = None) -> list[np.ndarray]:
        """New arrays of observations, one for each leaf; `which` environments they are of."""
        try:
            if not self.is_tree:
                return [self.leaves[0].stack(seen)]
            space = self.form.observation_space
            each = [spaces.flatten(space, obs, index=i) for i, obs in enumerate(seen)]
            return [leaf.stack(list(values)) for leaf, values in zip(self.leaves, zip(*each, strict=True), strict=True)]
        except spaces.WrongValue as wrong:
            self.wrong(wrong.index if which is None else which[wrong.index], part, f"an observation {wrong}")

    def _note(self, i: int, info: dict[str, Any]) -> None:
        for key, values in zip(self.info_keys, self.infos, strict=True):
            if key in info:
                try:
                    values[i] = info[key]
                except (TypeError, ValueError):
                    self.wrong(i, "step", f"{describe(info[key])} as info[{key!r}], not a number")

    def _rewards(self, rewards: Sequence[Any]) -> np.ndarray:
        try:
            reward = np.array(rewards, self.float)
        except (TypeError, ValueError):
            reward = np.empty(())  # looked into below
        if reward.shape != (len(rewards),):
            bad = next(i for i, x in enumerate(rewards) if np.ndim(x) or not isinstance(x, float | int | np.generic))
            self.wrong(bad, "step", f"{describe(rewards[bad])} as reward, not a number")
        return reward


def _bare_step(env: gymnasium.Env) -> tuple[Callable[[Any], Any], float]:
    """The `step` below wrappers that only count or complain, and the limit they count to.

    `gymnasium.make` puts a TimeLimit, an OrderEnforcing and a PassiveEnvChecker around everything; a batch resets before it
    steps and counts steps anyhow, and the last one looks only at the first step. On a fast environment these calls are a
    tenth of the time.
    """
    limit = math.inf
    while type(env) in (TimeLimit, OrderEnforcing) or (type(env) is PassiveEnvChecker and env.checked_step):
        if isinstance(env, TimeLimit):
            limit = min(limit, float(env._max_episode_steps))
        env = env.env  # pyright: ignore[reportAttributeAccessIssue]
    return env.step, limit


def _each(space: gymnasium.Space, prepare: list[Prepare], count: int) -> Callable[..., Sequence[Any]]:
    """From the leaves of all actions to the action of each environment."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return lambda leaves: list(map(DiscreteAction, leaves[0].tolist()))
    if not isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple):
        return lambda leaves: prepare[0](leaves[0])  # pyright: ignore[reportReturnType]

    def each(leaves: Sequence[np.ndarray]) -> Sequence[Any]:
        parts = [prepared(leaf) for prepared, leaf in zip(prepare, leaves, strict=True)]
        return [spaces.unflatten(space, iter([part[i] for part in parts])) for i in range(count)]

    return each


class DiscreteAction(int):
    """An action of a Discrete space. Gymnasium's are numpy's numbers, and this answers like one; but a check that it is
    within its space, which most environments make in every step, takes a tenth of the time for an int."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np.int64(self), name)
