"""One contestant of `python -m benchmark speed` that is not ours, measured in this process, with its own libraries:
python peers.py NAME WARMUP ITERATIONS [CLEANRL]

The last line it prints is JSON: steps and seconds of the iterations after the warm-up, and versions. It runs in an
environment with speed_requirements.txt, so it imports nothing of ours; `environment` needs gymnasium[mujoco] alone.
"""

import json
import platform
import runpy
import sys
import time
from importlib.metadata import distributions

ENV_ID, GAMMA, MINIBATCH_SIZE, EPOCHS = "HalfCheetah-v5", 0.99, 64, 10
NUM_ENVS, NUM_STEPS, BATCH_SIZE = 16, 128, 2048  # ours and CleanRL's; Stable-Baselines3's own habit is 8 x 256
PACKAGES = ("torch", "numpy", "gymnasium", "mujoco", "stable_baselines3", "sbx-rl", "jax")


def main(name, warmup, measured, *cleanrl):
    marks, warmup, measured = [], int(warmup), int(measured)
    globals()[name](warmup + measured, lambda: marks.append(time.perf_counter()), *cleanrl)
    seconds = marks[-1] - marks[-1 - measured]  # a mark is the time at the end of an iteration
    versions = {d.name: d.version for d in distributions() if d.name in PACKAGES}
    versions = {"python": platform.python_version()} | versions
    print(json.dumps({"steps": measured * BATCH_SIZE, "seconds": seconds, "versions": versions}))


def environment(iterations, mark):
    """gymnasium's vector environment with random actions: what is left if learning costs nothing."""
    import gymnasium as gym
    import numpy as np

    envs = gym.vector.SyncVectorEnv([lambda: gym.make(ENV_ID)] * NUM_ENVS)
    envs.reset(seed=1)
    rng = np.random.default_rng(1)
    for _ in range(iterations):
        for action in rng.uniform(-1, 1, (NUM_STEPS, *envs.action_space.shape)).astype(np.float32):
            envs.step(action)
        mark()


def sb3(iterations, mark):
    import torch
    from stable_baselines3 import PPO

    torch.set_num_threads(1)
    learn(PPO, iterations, mark, device="cpu")


def sbx(iterations, mark):
    import jax
    from sbx import PPO

    learn(PPO, iterations, mark, finish=lambda model: jax.block_until_ready(model.policy.actor_state.params))


def learn(PPO, iterations, mark, finish=lambda model: None, **settings):
    """Stable-Baselines3's PPO, or one with its interface; observations and rewards normalised, as usual for MuJoCo."""
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    class Marks(BaseCallback):
        def _on_rollout_start(self):  # the last iteration ended
            mark()

        def _on_training_end(self):
            finish(self.model)
            mark()

        def _on_step(self):
            return True

    envs = VecNormalize(make_vec_env(ENV_ID, 8, seed=1, vec_env_cls=DummyVecEnv), gamma=GAMMA)
    settings |= {"n_steps": 256, "batch_size": MINIBATCH_SIZE, "n_epochs": EPOCHS, "gamma": GAMMA}
    model = PPO("MlpPolicy", envs, policy_kwargs={"net_arch": [64, 64]}, seed=1, **settings)
    model.learn(BATCH_SIZE * iterations, callback=Marks())


def cleanrl(iterations, mark, path):
    """CleanRL's file as it is, by its own flags; what gymnasium has changed since is bridged in this process."""
    import gymnasium as gym
    import torch
    from torch.utils.tensorboard import SummaryWriter

    torch.set_num_threads(1)
    add_scalar, TransformObservation = SummaryWriter.add_scalar, gym.wrappers.TransformObservation

    def marking(self, tag, *more, **settings):
        add_scalar(self, tag, *more, **settings)
        if tag == "charts/SPS":  # the last thing of an iteration
            mark()

    def transform(env, func):  # observation_space has become an argument that must be given
        return TransformObservation(env, func, env.observation_space)

    SummaryWriter.add_scalar, gym.wrappers.TransformObservation = marking, transform
    flags = {"env-id": ENV_ID, "num-envs": NUM_ENVS, "num-steps": NUM_STEPS, "update-epochs": EPOCHS, "gamma": GAMMA}
    flags |= {"num-minibatches": BATCH_SIZE // MINIBATCH_SIZE, "total-timesteps": BATCH_SIZE * iterations}
    sys.argv = [path, "--no-cuda", *(word for flag, x in flags.items() for word in (f"--{flag}", str(x)))]
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
