"""Algorithms by name, one file each.

A2C, IMPALA and REINFORCE share `one_gradient.py`; DDPG, TD3 and SAC share `replayed_control.py`.
"""

from choreo.algos.a2c import A2C as A2C
from choreo.algos.ddpg import DDPG as DDPG
from choreo.algos.dqn import DQN as DQN
from choreo.algos.impala import IMPALA as IMPALA
from choreo.algos.ppo import PPO as PPO
from choreo.algos.reinforce import REINFORCE as REINFORCE
from choreo.algos.sac import SAC as SAC
from choreo.algos.td3 import TD3 as TD3
from choreo.errors import unknown_name

ALGOS: dict[str, type] = {
    "ppo": PPO,
    "a2c": A2C,
    "impala": IMPALA,
    "reinforce": REINFORCE,
    "dqn": DQN,
    "ddpg": DDPG,
    "td3": TD3,
    "sac": SAC,
}


def find(name: str) -> type:
    """The class of the algorithm with this name.

    >>> find("ppo")().unroll
    128
    """
    if name not in ALGOS:
        raise unknown_name("algorithm", name, ALGOS, fix="An algorithm of your own is `file.py:ClassName`.")
    return ALGOS[name]
