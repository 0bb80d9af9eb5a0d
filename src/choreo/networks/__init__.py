"""Networks, and the factories that build them.

A *factory* `(observation_space, action_space, key) -> module` builds a network. A network is any pytree of arrays with one of
these interfaces. In all of them, `obs` is the observation of a single environment, without a batch axis:

    module(obs) -> (pi, value)                       an actor-critic: mlp, atari_cnn; pi is an `ops.Distribution`
    module(obs, memory) -> (pi, value, memory)       an actor-critic with memory: lstm; derives from `Recurrent`
    module(obs) -> values                            values of Discrete actions [action, atom]: q_mlp, q_cnn; see q.py for atoms
    module.policy(obs), module.critics               control of continuous actions: deterministic, squashed

Change the options of a factory with `functools.partial(mlp, hidden=(256, 256))`.

    dense.py        layers on vectors: mlp; deterministic, squashed
    recurrent.py    lstm
    frames.py       convolutions on images: atari_cnn, q_cnn
    q.py            q_mlp, and the head of networks for action values
"""

from choreo.envs.spaces import ACTION_MASK as ACTION_MASK
from choreo.envs.spaces import Bounds as Bounds
from choreo.envs.spaces import Encoder as Encoder
from choreo.envs.spaces import action_mask as action_mask
from choreo.envs.spaces import bounds_of as bounds_of
from choreo.envs.spaces import check_action_mask as check_action_mask
from choreo.envs.spaces import encoder as encoder
from choreo.networks.dense import Factory as Factory
from choreo.networks.dense import Squashed as Squashed
from choreo.networks.dense import deterministic as deterministic
from choreo.networks.dense import mlp as mlp
from choreo.networks.dense import squashed as squashed
from choreo.networks.frames import atari_cnn as atari_cnn
from choreo.networks.frames import q_cnn as q_cnn
from choreo.networks.q import QFactory as QFactory
from choreo.networks.q import q_mlp as q_mlp
from choreo.networks.recurrent import Recurrent as Recurrent
from choreo.networks.recurrent import lstm as lstm
from choreo.static_key import freeze as freeze
from choreo.static_key import thaw as thaw
