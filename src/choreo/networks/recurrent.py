"""Actor-critics with memory: `Recurrent`, from which every network with memory derives, and `lstm`."""

import abc
from collections.abc import Sequence

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp

from choreo.envs.spaces import Encoder, action_mask, check_action_mask, encoder
from choreo.networks.dense import PolicyHead, apply_tanh, layers, linear, policy_head
from choreo.ops import Distribution
from choreo.types import Key, PyTree


def lstm(
    observation_space: gymnasium.Space,
    action_space: gymnasium.Space,
    key: Key,
    *,
    hidden: Sequence[int] = (64,),
    width: int = 64,
) -> "LSTM":
    """Tanh layers, then an LSTM that actor and critic share."""
    check_action_mask(observation_space, action_space)
    key_torso, key_cell, key_policy, key_value = jax.random.split(key, 4)
    encode = encoder(observation_space)
    widths = (encode.size, *hidden)
    return LSTM(
        encode=encode,
        torso=layers(key_torso, widths),
        cell=eqx.nn.LSTMCell(widths[-1], width, key=key_cell),
        policy=policy_head(action_space, width, key_policy),
        value=linear(key_value, width, 1, scale=1.0),
    )


class Recurrent(eqx.Module):
    """A network with memory: `module(obs, memory) -> (pi, value, memory)`."""

    @abc.abstractmethod
    def initial_state(self) -> PyTree:
        """The memory of one environment at the beginning of an episode."""

    @abc.abstractmethod
    def __call__(self, obs: PyTree, memory: PyTree) -> tuple[Distribution, jax.Array, PyTree]:
        """One step of one environment."""


class LSTM(Recurrent):
    """The network of `lstm`."""

    encode: Encoder
    torso: tuple[eqx.nn.Linear, ...]
    cell: eqx.nn.LSTMCell
    policy: PolicyHead
    value: eqx.nn.Linear

    def initial_state(self) -> tuple[jax.Array, jax.Array]:
        zeros = jnp.zeros(self.cell.hidden_size, self.cell.weight_hh.dtype)
        return zeros, zeros

    def __call__(self, obs: PyTree, memory: PyTree) -> tuple[Distribution, jax.Array, PyTree]:
        memory = self.cell(apply_tanh(self.torso, self.encode(obs)), memory)
        return self.policy(memory[0], action_mask(obs)), self.value(memory[0])[0], memory
