"""A block of Gymnasium environments, which are stepped one after the other.

    MakeBatch(source=..., form=probe(source))(range(4, 8))  ->  GymBatch: environments 4, 5, 6, 7

The batch resets an environment in the step that ends its episode. Only the first reset has a seed; later episodes continue
the environment's own random stream.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from choreo.host import spaces
from choreo.host.batch import Batch, Prepare
from choreo.host.env_errors import describe, env_raised
from choreo.host.probe import MASK, EnvForm
from choreo.host.sources import Source
from choreo.host.states import METHODS, NoState, has_state


class GymBatch(Batch):
    """The environments with the numbers `envs`; each environment is one Python object."""

    def __init__(self, envs: range, source: Source, *, form: EnvForm, info_keys: tuple[str, ...], wide: bool):
        super().__init__(envs, name=source.name, form=form, info_keys=info_keys, wide=wide)
        self.is_tree = isinstance(self.form.observation_space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple)
        self.action_of_each = _action_splitter(self.form.action_space, self.prepare, len(envs))
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
        """The count at which each episode reaches its time limit."""
        self.first_due = math.inf

    def reset(self, seeds: np.ndarray) -> tuple[np.ndarray, ...]:
        return self.reset_results(
            self._stack([self._reset_one(i, seed) for i, seed in enumerate(seeds.tolist())], "reset")
        )

    def step(self, token: np.ndarray, *action: np.ndarray) -> tuple[np.ndarray, ...]:
        self.check_token(token)
        actions = self.action_of_each(action)
        results = []
        try:
            for self.current, step, one in zip(self.envs, self.steps, actions, strict=True):  # noqa: B020
                results.append(step(one))
        except (Exception, SystemExit) as error:
            raise env_raised(self.name, f"Environment {self.current}", "step", error) from error
        try:
            seen, rewards, terminated, truncated, infos = zip(*results, strict=True)
            over = any(terminated) or any(truncated)
        except (TypeError, ValueError):
            self._refuse_malformed(results)
        self.count += 1
        ended, terminal = [], []
        if over or self.count >= self.first_due:
            terminal = [i for i, is_terminal in enumerate(terminated) if is_terminal]
            ended = [i for i, due in enumerate(self.due) if terminated[i] or truncated[i] or self.count >= due]
        if self.form.masked:
            seen = [self._masked(obs, info, i, "step") for i, (obs, info) in enumerate(zip(seen, infos, strict=True))]
        if self.info_keys:
            for i, info in enumerate(infos):
                self._keep_info(i, info)

        def restart(obs: list[np.ndarray]) -> None:
            fresh = self._stack([self._reset_one(i, None) for i in ended], "reset", ended)
            for leaf, new in zip(obs, fresh, strict=True):
                leaf[ended] = new

        return self.step_results(token, self._stack(seen, "step"), self._rewards(rewards), ended, terminal, restart)

    def member_states(self) -> list[Any]:
        layers = [_layer_with_state(env, self.name) for env in self.members]
        return [self._call_member(i, "state", layer.state) for i, layer in enumerate(layers)]

    def load_members(self, states: list[Any], steps: list[int]) -> None:
        layers = [_layer_with_state(env, self.name) for env in self.members]
        for i, (layer, state, step) in enumerate(zip(layers, states, steps, strict=True)):
            # Reset first: many environments make their attributes in `reset`, and some of Gymnasium's wrappers raise an error in
            # `step` if the environment was not reset.
            self._reset_one(i, 0)
            self._call_member(i, "load", layer.load, state)
            self.due[i] -= step
            for wrapper in _wrappers_above(self.members[i], layer):
                if isinstance(wrapper, TimeLimit):  # it counts steps if `_bare_step` has not removed it
                    wrapper._elapsed_steps = step
        self.first_due = min(self.due)

    def _call_member(self, i: int, part: str, method: Callable[..., Any], *args: Any) -> Any:
        self.current = self.envs.start + i
        try:
            result = method(*args)
        except (Exception, SystemExit) as error:
            raise env_raised(self.name, f"Environment {self.current}", part, error) from error
        self.current = None
        return result

    def close(self) -> None:
        while self.members:
            self.members.pop().close()

    def _reset_one(self, i: int, seed: int | None) -> Any:
        """Begin an episode in environment `i` of this batch; returns the first observation."""
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
            self.wrong(i, part, f"an observation without info[{MASK!r}], although the first reset returned one")
        return {"obs": seen, MASK: info[MASK]}

    def _refuse_malformed(self, results: list[Any]) -> NoReturn:
        """Raise EnvError for the first result in `results` that is malformed."""
        for i, result in enumerate(results):
            if not isinstance(result, tuple) or len(result) != 5:
                self.wrong(i, "step", f"{describe(result)}, not (obs, reward, terminated, truncated, info)")
            for name, value in zip(("terminated", "truncated"), result[2:4], strict=True):
                if np.ndim(value):
                    self.wrong(i, "step", f"{describe(value)} as {name}, not a truth value")
        raise AssertionError("the results could not be unpacked, but none of them is malformed")

    def _stack(self, seen: Sequence[Any], part: str, which: Sequence[int] | None = None) -> list[np.ndarray]:
        """The observations as new arrays, one for each leaf. `which` holds the indices of the environments, or None for all."""
        try:
            if not self.is_tree:
                return [self.leaves[0].stack(seen)]
            space = self.form.observation_space
            each = [spaces.flatten(space, obs, index=i) for i, obs in enumerate(seen)]
            return [leaf.stack(list(values)) for leaf, values in zip(self.leaves, zip(*each, strict=True), strict=True)]
        except spaces.WrongValue as wrong:
            self.wrong(wrong.index if which is None else which[wrong.index], part, f"an observation {wrong}")

    def _keep_info(self, i: int, info: dict[str, Any]) -> None:
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
            reward = np.empty(())  # no valid shape, so the check below names the reward that is not a number
        if reward.shape != (len(rewards),):
            bad = next(i for i, x in enumerate(rewards) if np.ndim(x) or not isinstance(x, float | int | np.generic))
            self.wrong(bad, "step", f"{describe(rewards[bad])} as reward, not a number")
        return reward


def _layer_with_state(env: gymnasium.Env, name: str) -> Any:
    """The outermost layer (wrapper or bare environment) that offers its state, which includes the state of all layers below.

    Only wrappers whose state a batch knows may be above this layer. Raises NoState if another wrapper is above this layer, or
    if no layer offers its state.
    """
    layer: Any = env
    while not has_state(layer):
        if type(layer) not in (TimeLimit, OrderEnforcing, PassiveEnvChecker):
            raise NoState(f"`{type(layer).__name__}` of `{name}` has no {METHODS}")
        layer = layer.env
    return layer


def _wrappers_above(env: gymnasium.Env, layer: Any) -> Iterator[Any]:
    while env is not layer:
        yield env
        env = env.env  # pyright: ignore[reportAttributeAccessIssue]


def _bare_step(env: gymnasium.Env) -> tuple[Callable[[Any], Any], float]:
    """Return the `step` method below the wrappers that only count or check, and the time limit of these wrappers.

    `gymnasium.make` wraps an environment in PassiveEnvChecker, OrderEnforcing and, if it has a time limit, TimeLimit. A batch
    does not need these wrappers: it counts steps itself and always resets first, and PassiveEnvChecker checks only the first
    step. With a fast environment, the wrappers would take a tenth of the time of a step.
    """
    limit = math.inf
    while type(env) in (TimeLimit, OrderEnforcing) or (type(env) is PassiveEnvChecker and env.checked_step):
        if isinstance(env, TimeLimit):
            limit = min(limit, float(env._max_episode_steps))
        env = env.env  # pyright: ignore[reportAttributeAccessIssue]
    return env.step, limit


def _action_splitter(space: gymnasium.Space, prepare: list[Prepare], count: int) -> Callable[..., Sequence[Any]]:
    """Return a function that takes the actions of all environments, one array per leaf, and returns one action per environment."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return lambda leaves: list(map(DiscreteAction, leaves[0].tolist()))
    if not isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple):
        return lambda leaves: prepare[0](leaves[0])  # pyright: ignore[reportReturnType]

    def each(leaves: Sequence[np.ndarray]) -> Sequence[Any]:
        parts = [prepared(leaf) for prepared, leaf in zip(prepare, leaves, strict=True)]
        return [spaces.unflatten(space, iter([part[i] for part in parts])) for i in range(count)]

    return each


class DiscreteAction(int):
    """An action of a Discrete space: an int that also has the attributes of numpy's int64, the type of Gymnasium's actions.

    Most environments check in every step that the action is in the space. With an int, this check is ten times as fast.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(np.int64(self), name)
