"""Algorithms by name; each is one file, readable top to bottom."""

from choreo.algos.ppo import PPO as PPO
from choreo.errors import unknown_name

ALGOS: dict[str, type] = {"ppo": PPO}


def find(name: str) -> type:
    """The class of that name.

    >>> find("ppo")().unroll
    128
    """
    if name not in ALGOS:
        raise unknown_name("algorithm", name, ALGOS, fix="An algorithm of your own is `file.py:ClassName`.")
    return ALGOS[name]
