"""A block of environments as one vector environment, in each of Gymnasium's autoreset modes.

    SAME_STEP    the vector environment begins the next episode in the step that ends an episode; the last observation of the
                 episode that ended is in info["final_obs"]
    DISABLED     we begin the next episode in the same step: reset(options={"reset_mask": ...})
    NEXT_STEP    Gymnasium's SyncVectorEnv and AsyncVectorEnv also accept a `reset_mask`, so we treat both as DISABLED.
                 Other vector environments use one extra step, t + 1 below, to begin the next episode, and ignore the action
                 of this step. We cannot hide the extra step, so it appears as an episode of length 0. In the table, `obs` is
                 the observation from which the next action is chosen, and `next_obs` is the observation before any reset:

                 step     t                     t + 1                      t + 2
                 obs      o_T                   o0'                        o1'
                 reward   r_T                   0                          r1'
                 last     True                  True                       False
                 next_obs o_T                   o_T                        o1'
                 discount 0 if terminated       as in step t               1
                 length   T                     0: not counted             1

From step t, a learner learns the same as in the other modes. From step t + 1, a learner learns about the value of o_T. If o_T
is terminal, the target of this value is 0, which is right. Otherwise the target is gamma times the value of o_T itself. If gamma
is close to 1, this target changes the value only a little.

The vector environment gets a list of seeds, one for each environment. A vector environment that accepts only one seed gets
the first seed; then its episodes depend on how the environments are divided among sites.
"""

from typing import Any

import numpy as np
from gymnasium.error import Error as GymnasiumError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from choreo.errors import EnvError
from choreo.host import spaces
from choreo.host.batch import Batch
from choreo.host.env_errors import describe, env_raised
from choreo.host.probe import EnvForm
from choreo.host.sources import Source
from choreo.host.states import METHODS, NoState, has_state


class VectorBatch(Batch):
    """The environments with the numbers `envs`, as one vector environment."""

    def __init__(self, envs: range, source: Source, *, form: EnvForm, info_keys: tuple[str, ...], wide: bool):
        super().__init__(envs, name=source.name, form=form, info_keys=info_keys, wide=wide)
        self.env = source.make_vector(len(envs))
        self.mode = _mode(self.env, self.name)
        if isinstance(self.env.unwrapped, SyncVectorEnv | AsyncVectorEnv) and self.mode is AutoresetMode.NEXT_STEP:
            self.mode = AutoresetMode.DISABLED  # both classes accept a `reset_mask` too
        self.idle = np.zeros(len(envs), np.bool_)
        """Which environments are idle: they will ignore their next action and begin an episode instead (NEXT_STEP)."""
        self.idle_terminal = np.zeros(len(envs), np.bool_)
        """Which idle environments ended their episode by termination."""
        self.final: list[np.ndarray] = []
        """`next_obs` of the latest step. Only the rows of idle environments are read, the last observations of their episodes."""

    def reset(self, seeds: np.ndarray) -> tuple[np.ndarray, ...]:
        self.idle[:] = False
        obs, _ = self._call("reset", self._reset, seeds.tolist())
        return self.reset_results(self._leaves(obs, "reset"))

    def step(self, token: np.ndarray, *action: np.ndarray) -> tuple[np.ndarray, ...]:
        self.check_token(token)
        parts = [prepare(leaf) for prepare, leaf in zip(self.prepare, action, strict=True)]
        result = self._call("step", self.env.step, spaces.unflatten(self.form.action_space, iter(parts)))
        if not isinstance(result, tuple) or len(result) != 5:
            self.wrong(0, "step", f"{describe(result)}, not (obs, reward, terminated, truncated, info)")
        seen, reward, terminated, truncated, info = result
        obs, reward = self._leaves(seen, "step"), np.array(reward, self.float)
        terminated, done = np.asarray(terminated, np.bool_), np.logical_or(terminated, truncated)
        if reward.shape != (len(self.envs),) or done.shape != reward.shape:
            self.wrong(
                0, "step", f"rewards {reward.shape} and ends {done.shape}; both must have the shape ({len(self.envs)},)"
            )
        if self.info_keys:
            self._keep_info(info, done)
        if self.mode is AutoresetMode.SAME_STEP:
            return self._same_step(token, obs, reward, terminated, done, info)
        if self.mode is AutoresetMode.DISABLED:
            return self._disabled(token, obs, reward, terminated, done)
        return self._next_step(token, obs, reward, terminated, done)

    def member_states(self) -> list[Any]:
        env = self._with_state()
        states = self._call("state", env.state)
        final = zip(*self.final, strict=True) if self.final else ([] for _ in self.envs)
        rows = zip(states, self.idle.tolist(), self.idle_terminal.tolist(), final, strict=True)
        return [
            {"state": state, "idle": idle, "idle_terminal": terminal, "final": [np.array(leaf) for leaf in last]}
            for state, idle, terminal, last in rows
        ]

    def load_members(self, states: list[Any], steps: list[int]) -> None:
        env = self._with_state()
        self._call("reset", self._reset, [0] * len(states))
        self._call("load", env.load, [state["state"] for state in states])
        self.idle, self.idle_terminal = (
            np.array([state[name] for state in states], np.bool_) for name in ("idle", "idle_terminal")
        )
        self.final = [np.stack(leaves) for leaves in zip(*(state["final"] for state in states), strict=True)]

    def close(self) -> None:
        self.env.close()

    def _same_step(self, token, obs, reward, terminated, done, info) -> tuple[np.ndarray, ...]:
        if done.any() and "final_obs" not in info:
            self.wrong(int(done.argmax()), "step", "no info['final_obs'] in the step that ended its episode")
        fresh, ended = obs, np.flatnonzero(done)
        if len(ended):
            final = [self._final_leaves(_row(info["final_obs"], i), i) for i in ended.tolist()]
            obs = [leaf.copy() for leaf in fresh]
            for leaf, values in zip(obs, zip(*final, strict=True), strict=True):
                leaf[ended] = np.stack(values)

        def restart(out: list[np.ndarray]) -> None:
            for leaf, new in zip(out, fresh, strict=True):
                leaf[ended] = new[ended]

        return self.step_results(token, obs, reward, ended.tolist(), np.flatnonzero(terminated).tolist(), restart)

    def _disabled(self, token, obs, reward, terminated, done) -> tuple[np.ndarray, ...]:
        def restart(out: list[np.ndarray]) -> None:
            seen, _ = self._call("reset", lambda mask: self.env.reset(options={"reset_mask": mask}), done.copy())
            for leaf, new in zip(out, self._leaves(seen, "reset"), strict=True):
                leaf[done] = new[done]

        ended, terminal = np.flatnonzero(done).tolist(), np.flatnonzero(terminated).tolist()
        return self.step_results(token, obs, reward, ended, terminal, restart)

    def _next_step(self, token, obs, reward, terminated, done) -> tuple[np.ndarray, ...]:
        idle, fresh = self.idle, obs
        if idle.any():
            obs = [leaf.copy() for leaf in fresh]
            for leaf, final in zip(obs, self.final, strict=True):
                leaf[idle] = final[idle]
            reward[idle] = 0

        def restart(out: list[np.ndarray]) -> None:
            for leaf, new in zip(out, fresh, strict=True):
                leaf[idle] = new[idle]

        ends, terminal = done | idle, np.where(idle, self.idle_terminal, terminated)
        results = self.step_results(
            token, obs, reward, np.flatnonzero(ends).tolist(), np.flatnonzero(terminal).tolist(), restart
        )
        self.idle, self.idle_terminal, self.final = done & ~idle, terminated, [leaf.copy() for leaf in obs]
        self.began[self.idle] += 1  # the extra step does not count for the length of the episode
        return results

    def _with_state(self) -> Any:
        if not has_state(self.env):
            raise NoState(f"The vector environment `{self.name}` has no {METHODS}")
        return self.env

    def _reset(self, seeds: list[int]) -> Any:
        try:
            return self.env.reset(seed=seeds)  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError, GymnasiumError):
            return self.env.reset(seed=seeds[0])

    def _call(self, part: str, method: Any, *args: Any) -> Any:
        self.current = self.envs.start
        try:
            return method(*args)
        except Exception as error:
            which = f"One of the environments {self.envs.start} to {self.envs.stop - 1}"
            raise env_raised(self.name, which, part, error) from error

    def _leaves(self, seen: Any, part: str) -> list[np.ndarray]:
        """The observations of all environments as new arrays [env, ...], one for each leaf."""
        count = len(self.envs)
        try:
            values = spaces.flatten(self.form.observation_space, seen, index=0)
            return [leaf.whole(value, count) for leaf, value in zip(self.leaves, values, strict=True)]
        except spaces.WrongValue as wrong:
            self.wrong(wrong.index, part, f"observations {wrong}")

    def _final_leaves(self, seen: Any, i: int) -> list[Any]:
        """The leaves of the last observation of environment `i`'s episode."""
        try:
            values = spaces.flatten(self.form.observation_space, seen, index=i)
            return [leaf.check(value, i) for leaf, value in zip(self.leaves, values, strict=True)]
        except spaces.WrongValue as wrong:
            self.wrong(i, "step", f"as final_obs {wrong}")

    def _keep_info(self, info: dict[str, Any], done: np.ndarray) -> None:
        """Store the values of `info_keys`. If `info["final_info"]` exists, it has the values of the episodes that ended."""
        final = info.get("final_info")
        for key, values in zip(self.info_keys, self.infos, strict=True):
            for found, among in ((info, ~done if isinstance(final, dict) else np.ones_like(done)), (final, done)):
                if isinstance(found, dict) and key in found:
                    present = among & np.asarray(found.get(f"_{key}", np.ones_like(done)), np.bool_)
                    values[present] = np.asarray(found[key])[present]


def _mode(env: VectorEnv, name: str) -> AutoresetMode:
    mode = env.metadata.get("autoreset_mode")
    if isinstance(mode, str) and mode in {m.value for m in AutoresetMode}:
        mode = AutoresetMode(mode)
    if not isinstance(mode, AutoresetMode):
        raise EnvError(
            f"The vector environment `{name}` does not say how it begins the next episode.",
            fix='Set metadata["autoreset_mode"] to the mode that it uses, for example gymnasium.vector.AutoresetMode.SAME_STEP.',
        )
    return mode


def _row(final: Any, i: int) -> Any:
    """The part of environment `i` in `final_obs`, which is an array of observations or a tree of such arrays."""
    if isinstance(final, dict):
        return {key: _row(part, i) for key, part in final.items()}
    if isinstance(final, tuple):
        return tuple(_row(part, i) for part in final)
    return final[i]
