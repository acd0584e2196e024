"""Small environments with known answers. From the command line:

PYTHONPATH=tests python ppo_continuous.py --env-id toy_envs:ThreeStep-v0
"""

import random

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete


class Counter(gym.Env):
    """Observes the number of steps since the reset; every reward is `reward`; terminates after `length` steps."""

    observation_space = Box(0, np.inf, (1,))
    action_space = Box(-1, 1, (1,))

    def __init__(self, length: float = np.inf, reward: float = 1.0, broken_at: float = np.inf, broken: str = ""):
        self.length, self.reward, self.broken_at, self.broken = length, reward, broken_at, broken
        if broken == "init":
            raise KeyError("a file that is not there")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        broken = self.steps == self.broken_at
        if broken and self.broken == "step":
            raise RuntimeError("a fault of the environment")
        reward = np.nan if broken and self.broken == "reward" else self.reward
        obs = np.full(1, np.nan, np.float32) if broken and self.broken == "obs" else self.observe()
        return obs, reward, self.steps >= self.length, False, {}

    def observe(self):
        return np.array([self.steps], np.float32)


class DictCounter(Counter):
    """A Dict observation: the count, and a position of shape (2, 1) that is far from mean 0 and variance 1."""

    observation_space = Dict({"count": Box(0, np.inf, (1,)), "position": Box(-np.inf, np.inf, (2, 1))})

    def observe(self):
        return {"count": super().observe(), "position": self.np_random.normal(1000, 50, (2, 1)).astype(np.float32)}


class DiscreteActions(Counter):
    action_space = Discrete(2)


class Noise(gym.Env):
    """Observations, rewards and episode ends are random and do not depend on the action, so that they are the same for
    every policy. Terminates, or is truncated, or both, each in a tenth of the steps or so. Keeps what it was given:
    every action, and the seed of each instance's first episode."""

    observation_space = Box(-np.inf, np.inf, (3,))
    action_space = Box(-0.1, 0.1, (2,))
    seeds, actions = [], []  # of all instances; `forget` empties them

    @classmethod
    def forget(cls):
        cls.seeds.clear()
        cls.actions.clear()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if not hasattr(self, "first_seed"):
            self.first_seed = seed
            self.seeds.append(seed)
        return self.observe(), {}

    def step(self, action):
        self.actions.append(np.array(action))
        terminated, truncated = (bool(x) for x in self.np_random.random(2) < 0.1)
        return self.observe(), float(self.np_random.normal(1, 10)), terminated, truncated, {}

    def observe(self):
        return self.np_random.normal([0, 5, -100], [1, 3, 0.1]).astype(np.float32)


class Matrix(Noise):
    """Observations and actions are 2 x 2 float64; the bounds of the actions are not about 0."""

    observation_space = Box(-np.inf, np.inf, (2, 2), np.float64)
    action_space = Box(np.array([[0.5, -2], [1, -np.inf]]), np.array([[0.7, -1], [np.inf, np.inf]]), dtype=np.float64)
    seeds, actions = [], []

    def observe(self):
        return self.np_random.normal(size=(2, 2))


class Sign(gym.Env):
    """One step: observes -1 or 1 at random, and is paid just that. The value of an observation is itself."""

    observation_space = Box(-1, 1, (1,))
    action_space = Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = self.np_random.choice([-1, 1], 1).astype(np.float32)
        return self.obs, {}

    def step(self, action):
        return self.obs, float(self.obs[0]), True, False, {}


class Delayed(Counter):
    """Two steps; the reward of 1 comes with the second. Discounted return of the first observation: gamma."""

    def step(self, action):
        obs, _, _, _, info = super().step(action)
        return obs, float(self.steps == 2), self.steps == 2, False, info


class Target(Counter):
    """One step, paid by the squared distance of the action from 1/2. The best policy mean is 1/2."""

    def step(self, action):
        obs, _, _, _, info = super().step(action)
        return obs, -float((action[0] - 0.5) ** 2), True, False, info


class Unseeded(Counter):
    """Observes numbers that no seed repeats."""

    def observe(self):
        return np.random.default_rng().normal(size=1).astype(np.float32)


class Walk(Noise):
    """Observes the sum of the actions, and writes into the array that it was given. Episodes end at random."""

    observation_space = Box(-np.inf, np.inf, (2,))
    seeds, actions = [], []

    def reset(self, *, seed=None, options=None):
        self.position = np.zeros(2, np.float32)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        action *= 0.5
        self.position += action
        return super().step(action)

    def observe(self):
        return self.position.copy()


class OwnGenerator(Counter):
    """Rewards of a generator of its own, which begins again where a seed is given; the observation does not show it."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.reward = self.rng.normal()
        return super().step(action)


class SpaceSample(Counter):
    """Observes samples of its action space."""

    def __init__(self, **more):
        super().__init__(**more)
        self.action_space = Box(-1, 1, (1,))

    def observe(self):
        return self.action_space.sample()


class GlobalRandom(Counter):
    """Rewards of the random numbers that all of a process share."""

    def step(self, action):
        self.reward = random.random() + np.random.rand()
        return super().step(action)


class EpisodeCounter(Counter):
    """Observes how many episodes it has begun."""

    episodes = 0

    def reset(self, *, seed=None, options=None):
        self.episodes += 1
        return super().reset(seed=seed, options=options)

    def observe(self):
        return np.array([self.episodes], np.float32)


class ReusedArray(Counter):
    """Observes -5, -4, ..., always in the same array."""

    x = np.zeros(1, np.float32)

    def observe(self):
        self.x[:] = self.steps - 5
        return self.x


class OddInfos(Counter):
    """Infos whose entries change in length, type and presence, by themselves and from one environment to the other."""

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        n = self.np_random.integers(4)
        info = {"contacts": np.zeros(n + 1), "note": [None, "text", 3, {"a": [n]}][n], f"only_{n}": 1, "length": "long"}
        return obs, reward, terminated, truncated, info


def register(name: str, env: type, **more) -> None:
    gym.register(f"{name}-v0", env, disable_env_checker=True, **more)


register("ThreeStep", Counter, kwargs={"length": 3})
register("ThreeStepTimeLimit", Counter, max_episode_steps=3)
register("ThreeStepBoth", Counter, kwargs={"length": 3}, max_episode_steps=3)
register("NanReward", Counter, kwargs={"length": 20, "broken_at": 11, "broken": "reward"})
register("NanObservation", Counter, kwargs={"length": 20, "broken_at": 11, "broken": "obs"})
register("RaisesInStep", Counter, kwargs={"broken_at": 11, "broken": "step"})
register("RaisesInInit", Counter, kwargs={"broken": "init"})
register("Endless", Counter)
register("HugeReward", Counter, kwargs={"length": 20, "reward": 1e39})  # above the largest float32
register("DictCounter", DictCounter, kwargs={"length": 3})
register("DiscreteActions", DiscreteActions, kwargs={"length": 3})
register("Noise", Noise)
register("Constant", Counter, kwargs={"length": 1})
register("Matrix", Matrix)
register("Unseeded", Unseeded, kwargs={"length": 20})
register("Walk", Walk)
register("Sign", Sign)
register("Delayed", Delayed)
register("Target", Target)
register("OwnGenerator", OwnGenerator, kwargs={"length": 5}, max_episode_steps=5)
register("SpaceSample", SpaceSample, kwargs={"length": 5}, max_episode_steps=5)
register("GlobalRandom", GlobalRandom, kwargs={"length": 5}, max_episode_steps=5)
register("EpisodeCounter", EpisodeCounter, kwargs={"length": 5}, max_episode_steps=5)
register("ReusedArray", ReusedArray, max_episode_steps=3)
register("RewardInArray", Counter, kwargs={"length": 3, "reward": np.ones(1)})
register("RewardOfNumpy", Counter, kwargs={"length": 3, "reward": np.float32(1)})
register("RewardOfTwo", Counter, kwargs={"length": 3, "reward": np.ones(2)})
register("OddInfos", OddInfos, kwargs={"length": 3})
