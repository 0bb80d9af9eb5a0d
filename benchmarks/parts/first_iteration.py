"""Train PPO on CartPole-v1 for one iteration, then print "finished": `python first_iteration.py choreo` or `sb3`."""

import sys


def choreo() -> None:
    import choreo

    choreo.train(choreo.PPO(), "CartPole-v1", num_envs=8, steps=1024, on_iteration=lambda i, row: report())


def sb3() -> None:
    from sb3 import make

    make("CartPole-v1", 8).learn(1024)
    report()


def report() -> None:
    print("finished", flush=True)


if __name__ == "__main__":
    {"choreo": choreo, "sb3": sb3}[sys.argv[1]]()
