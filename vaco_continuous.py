# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "numpy==2.4.6", "gymnasium[mujoco]==1.4.0", "mujoco==4.0.0", "tyro==1.0.17", "tensorboard==2.21.0",
# ]
# ///
"""VACO (arXiv 2603.01365) for continuous control under policy lag, in one file. Base script: ppo_continuous.py.

What differs from PPO, in the order of the file:

1. Align, against backward lag: `vtrace` estimates advantages and value targets for pi_T, the learner as the update
   starts, from actions of mu. It takes the place of `gae`, which remains for `--no-realign`.
2. Filter, against forward lag: `tv_filter` estimates, in every minibatch, the total variation between pi_theta and
   pi_T; where it exceeds delta/2 it drops the points whose gradient would increase it. There is no clip.
3. The surrogate weights every point that is kept by the plain ratio pi_theta/mu.

What is known of the paper leaves some choices open; a comment marks those made here.

Three policies: mu acts (an old snapshot), pi_T is the learner when an update starts, pi_theta is being updated.
"""

import csv
import errno
import io
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import zipfile
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn


@dataclass(frozen=True)
class Args:
    env_id: str = "HalfCheetah-v5"
    """gymnasium id of an environment with a Box action space, or module:EnvId"""
    seed: int = 1
    """seed of every random stream"""
    total_timesteps: int = 1_000_000
    """environment steps in all, rounded down to whole batches"""
    num_envs: int = 16
    """N, environments stepped side by side"""
    num_steps: int = 128
    """T, steps of each environment per update; the batch is B = T N"""
    num_minibatches: int = 32
    """minibatches per epoch, of M = B / num_minibatches points each; more of them is more forward lag"""
    update_epochs: int = 10
    """passes over each batch; more of them is more forward lag"""
    learning_rate: float = 3e-4
    """step size of Adam at the start"""
    anneal_lr: bool = True
    """lower the learning rate linearly to 0"""
    gamma: float = 0.99
    """gamma, discount per step"""
    gae_lambda: float = 0.95
    """lambda, decay of the advantage trace per step"""
    norm_adv: bool = True
    """normalise advantages to mean 0 and std 1 in each minibatch"""
    ent_coef: float = 0.0
    """weight of the entropy bonus (the maximum-entropy term), per nat"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """L2 norm to which the gradient is clipped"""
    target_kl: float | None = None
    """end the update after an epoch whose mean KL of pi_theta and pi_T, in nats, exceeds this; None: never"""
    lag: int = 0
    """L, largest age in updates of the policy that acts; 0 is synchronous"""
    lag_mode: Literal["uniform", "fixed"] = "uniform"
    """age of each environment's policy: uniform on 0..L, redrawn each rollout, or fixed at the oldest kept"""
    delta: float = 0.2
    """delta, threshold of the filter: it acts where the total variation of pi_theta and pi_T exceeds delta/2"""
    rho_bar: float = 1.0
    """rho bar, largest weight pi_T/mu of a temporal difference in the V-trace targets"""
    c_bar: float = 1.0
    """c bar, largest weight pi_T/mu of what follows in the V-trace targets"""
    realign: bool = True
    """estimate advantages for pi_T by V-trace; --no-realign: by GAE, as in PPO"""
    tv_filter: bool = True
    """drop points by total variation; --no-tv-filter: keep all"""
    eval_episodes: int = 10
    """episodes per evaluation of the current policy (sampled actions), each until it ends; 0: no evaluation"""
    num_evals: int = 10
    """evaluations, evenly spaced over the run"""
    run_dir: Path | None = None
    """folder for the files of the run; None: runs/{env_id}__{exp_name}__{seed}__{time}"""
    checkpoint_every: int = 50
    """updates from one checkpoint to the next; 0: only when a signal stops the run"""
    resume: Path | None = None
    """folder of a run to go on with, as if it had never stopped; takes no other flag"""
    exp_name: str = "vaco_continuous"
    """name of the experiment, part of the default folder"""
    device: str = "cpu"
    """torch device of the networks: cpu, cuda or cuda:1"""
    compile: bool = False
    """compile the gradient step into one graph: several times faster after half a minute; needs a C++ compiler"""
    track: bool = False
    """log to Weights & Biases as well (pip install wandb)"""

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def minibatch_size(self) -> int:
        return self.batch_size // self.num_minibatches

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size

    def __post_init__(self):
        check(self)


# ---------------------------------------------------------------------------------------------------- environments


def make_env(env_id: str) -> gym.Env:
    """One environment with its registered time limit and observations flattened to a vector.

    Raises Refused for an environment that cannot be made, or whose actions are not a Box of floats.
    """
    show_mujoco_warnings()
    try:
        env = gym.make(env_id)
    except Exception as error:  # unknown, not installed, or whatever its constructor raises
        raise Refused(f"--env-id {env_id}: {' '.join(str(error).split()) or repr(error)}") from error
    if env.spec.id != env_id.split(":")[-1]:
        raise Refused(f"--env-id {env_id}: name the version, {env.spec.id}; returns of two versions do not compare")
    if not isinstance(env.action_space, gym.spaces.Box) or env.action_space.dtype.kind != "f":
        raise Refused(f"--env-id {env_id} has actions {env.action_space}; continuous control needs a Box of floats")
    if not env.observation_space.is_np_flattenable or 0 in env.action_space.shape:
        spaces = f"observations {env.observation_space} and actions {env.action_space}"
        raise Refused(f"--env-id {env_id} has {spaces}, which do not flatten to vectors")
    is_vector = isinstance(env.observation_space, gym.spaces.Box) and len(env.observation_space.shape) == 1
    return Replay(env if is_vector else gym.wrappers.FlattenObservation(env))


class Replay(gym.Wrapper):
    """Remembers how the episode began and what was done in it, so that a resumed run can play it again. (Copying back
    MuJoCo's state is not exact.)"""

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        rng = None if seed is not None else self.np_random.bit_generator.state
        self.start, self.actions = {"seed": seed, "rng": rng}, []
        return self.env.reset(seed=seed, options=options)

    def step(self, action):
        self.actions.append(np.array(action))  # a copy: an environment may write into it
        return self.env.step(action)

    def episode(self) -> dict:
        return self.start | {"actions": torch.as_tensor(np.array(self.actions))}

    def replay(self, seed: int | None, rng: dict | None, actions: torch.Tensor) -> np.ndarray:
        """Plays an episode that `episode` gave. Returns its last observation."""
        if rng is not None:
            self.reset(seed=0)  # a random stream of this kind; its state is replaced
            self.np_random.bit_generator.state = rng
        obs, _ = self.reset(seed=seed)
        for action in actions.numpy():
            obs, *_ = self.step(action)
        return obs


def make_envs(env_id: str, num_envs: int) -> gym.vector.VectorEnv:
    # SAME_STEP: the step that ends an episode also resets. The default spends a step on it, a transition of nothing.
    autoreset_mode = gym.vector.AutoresetMode.SAME_STEP
    return gym.vector.SyncVectorEnv([lambda: make_env(env_id)] * num_envs, autoreset_mode=autoreset_mode)


def env_action(envs: gym.vector.VectorEnv, actions: torch.Tensor) -> np.ndarray:
    """(N, A) sampled actions -> what the environments receive: clipped to their bounds, in their shape and dtype."""
    space = envs.action_space
    return np.clip(actions.cpu().numpy().reshape(space.shape), space.low, space.high).astype(space.dtype)


def merge_moments(mean, var, count, batch):
    """Mean and population variance of `count` earlier samples and a batch (B, ...) together (Chan et al. 1979)."""
    batch_mean, batch_var, batch_count = batch.mean(0), batch.var(0, correction=0), len(batch)
    total = count + batch_count
    delta = batch_mean - mean
    squares = var * count + batch_var * batch_count + delta**2 * (count * batch_count / total)
    return mean + delta * (batch_count / total), squares / total, total


class RewardScaler:
    """Divides rewards by the standard deviation of the running discounted return, and clips them to +-10.

    As gymnasium's NormalizeReward, but the return restarts at every episode's end, by time limit too, and the
    statistics change only when `update` is called.
    """

    def __init__(self, num_envs: int, gamma: float):
        self.gamma = gamma
        self.returns = torch.zeros(num_envs, dtype=torch.float64)
        self.mean, self.var, self.count = torch.tensor(0.0), torch.tensor(1.0), 0

    def update(self, rewards: torch.Tensor, done: torch.Tensor) -> None:
        """rewards, done: (T, N)"""
        discounted = []
        for reward, end in zip(rewards.cpu(), done.cpu(), strict=True):
            self.returns = self.returns * self.gamma + reward
            discounted.append(self.returns)
            self.returns = torch.where(end, 0.0, self.returns)
        self.mean, self.var, self.count = merge_moments(self.mean, self.var, self.count, torch.cat(discounted))

    def __call__(self, rewards: torch.Tensor) -> torch.Tensor:
        return (rewards / math.sqrt(self.var + 1e-8)).clamp(-10, 10)


# -------------------------------------------------------------------------------------------------------- networks


def mlp(in_dim: int, out_dim: int, out_std: float) -> nn.Sequential:
    layers = nn.Linear(in_dim, 64), nn.Linear(64, 64), nn.Linear(64, out_dim)
    for layer, std in zip(layers, (math.sqrt(2), math.sqrt(2), out_std), strict=True):
        nn.init.orthogonal_(layer.weight, std)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def normalize(obs: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    return ((obs - mean) / torch.sqrt(var + 1e-8)).clamp(-10, 10)


class Agent(nn.Module):
    """Gaussian policy and value function of raw observations. The observation statistics are buffers, so that one
    `state_dict` is the whole policy."""

    def __init__(self, obs_dim: int, act_dim: int):
        super().__init__()
        self.actor, self.critic = mlp(obs_dim, act_dim, out_std=0.01), mlp(obs_dim, 1, out_std=1.0)
        self.log_std = nn.Parameter(torch.zeros(act_dim))
        self.register_buffer("obs_mean", torch.zeros(obs_dim))
        self.register_buffer("obs_var", torch.ones(obs_dim))
        self.register_buffer("obs_count", torch.zeros((), dtype=torch.int64))

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, obs_dim) -> (B, A), (B,)"""
        return self.action_mean(obs), self.value(obs)

    def action_mean(self, obs: torch.Tensor) -> torch.Tensor:
        """(B, obs_dim) -> (B, A)"""
        return self.actor(normalize(obs, self.obs_mean, self.obs_var))

    def value(self, obs: torch.Tensor) -> torch.Tensor:
        """(B, obs_dim) -> (B,)"""
        return self.critic(normalize(obs, self.obs_mean, self.obs_var)).squeeze(-1)

    @torch.no_grad()
    def update_obs_stats(self, obs: torch.Tensor) -> None:
        """obs: (B, obs_dim)"""
        moments = merge_moments(self.obs_mean.double(), self.obs_var.double(), self.obs_count, obs.double())
        for buffer, new in zip((self.obs_mean, self.obs_var, self.obs_count), moments, strict=True):
            buffer.copy_(new)


def gaussian_logprob(actions: torch.Tensor, mean: torch.Tensor, log_std: torch.Tensor) -> torch.Tensor:
    """Log-density of whole action vectors, summed over action dimensions: (..., A) -> (...)"""
    return (-0.5 * ((actions - mean) / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


# --------------------------------------------------------------------------------------------------- lag simulator


class PolicyLag:
    """Keeps the learner's last `lag` + 1 snapshots and gives each environment one of them, its behaviour policy mu.

    A snapshot carries its own observation statistics, as a remote actor's copy would.
    """

    def __init__(self, lag: int, rng: np.random.Generator, mode: str = "uniform"):
        assert mode in ("uniform", "fixed")
        self.snapshots = deque(maxlen=lag + 1)  # oldest first
        self.rng, self.mode = rng, mode

    def push(self, agent: nn.Module) -> None:
        self.snapshots.append({name: x.detach().clone() for name, x in agent.state_dict().items()})

    def draw(self, num_envs: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        """Snapshots stacked to {name: (N, ...)} and their ages (N,) in updates."""
        oldest = len(self.snapshots) - 1
        uniform = self.mode == "uniform"
        ages = self.rng.integers(0, oldest + 1, size=num_envs) if uniform else np.full(num_envs, oldest)
        drawn = [self.snapshots[oldest - age] for age in ages]
        return {name: torch.stack([snapshot[name] for snapshot in drawn]) for name in drawn[0]}, ages


def stacked_action_mean(policies: dict[str, torch.Tensor], obs: torch.Tensor) -> torch.Tensor:
    """`Agent.action_mean` of N policies in one batch, each on its own observation: (N, obs_dim) -> (N, A)"""
    x = normalize(obs, policies["obs_mean"], policies["obs_var"]).unsqueeze(1)  # (N, 1, obs_dim)
    for i in (0, 2, 4):
        weight, bias = policies[f"actor.{i}.weight"], policies[f"actor.{i}.bias"]  # (N, out, in), (N, out)
        x = torch.baddbmm(bias.unsqueeze(1), x if i == 0 else x.tanh(), weight.transpose(1, 2))
    return x.squeeze(1)


# ----------------------------------------------------------------------------------------------------------- maths


@torch.no_grad()
def gae(rewards, values, next_values, terminated, done, gamma, gae_lambda):
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16).

    delta_t = r_t + gamma (1 - terminated_t) V(s_{t+1}) - V(s_t);   A_t = delta_t + gamma lambda (1 - done_t) A_{t+1}

    All (T, N). next_values are those of the true next observation, at an episode's end too. `terminated` stops the
    bootstrap, `done` (terminated or truncated) ends the trace; both bool or 0/1.
    Returns (advantages, returns), both (T, N), returns = advantages + values.
    """
    assert rewards.shape == values.shape == next_values.shape == terminated.shape == done.shape
    deltas = rewards + gamma * torch.where(terminated.bool(), 0.0, next_values) - values
    decay = gamma * gae_lambda * (~done.bool()).to(rewards)
    advantages, next_advantage = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        next_advantage = advantages[t] = deltas[t] + decay[t] * next_advantage
    return advantages, advantages + values


@torch.no_grad()
def vtrace(rewards, values, next_values, terminated, done, log_rhos, gamma, gae_lambda, rho_bar=1.0, c_bar=1.0):
    """V-trace targets v (arXiv 1802.01561, eq. 1, with a decay lambda), and the advantages of pi_T that follow.

    rho_t = min(rho_bar, pi_T/mu);   c_t = min(c_bar, pi_T/mu);   delta_t as in `gae`
    x_t = v_t - V(s_t) = rho_t delta_t + gamma lambda c_t (1 - done_t) x_{t+1}
    A_t = delta_t + gamma lambda (1 - done_t) x_{t+1}

    log_rhos = log pi_T - log mu of whole actions; the rest as in `gae`, all (T, N).
    Returns (advantages, value_targets), both (T, N). log_rhos = 0 gives exactly `gae` (with bars of 1 or more).
    """
    assert rewards.shape == values.shape == next_values.shape == terminated.shape == done.shape == log_rhos.shape
    deltas = rewards + gamma * torch.where(terminated.bool(), 0.0, next_values) - values
    decay = gamma * gae_lambda * (~done.bool()).to(rewards)
    rhos, cs = log_rhos.exp().clamp(max=rho_bar), log_rhos.exp().clamp(max=c_bar)
    advantages, corrections = torch.zeros_like(rewards), torch.zeros_like(rewards)  # A, x
    next_correction = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        # a choice the paper leaves open: no rho_t in front of A_t, since the surrogate carries the ratio
        advantages[t] = deltas[t] + decay[t] * next_correction
        next_correction = corrections[t] = rhos[t] * deltas[t] + decay[t] * cs[t] * next_correction
    return advantages, values + corrections


@torch.no_grad()
def tv_filter(newlogprobs, learner_logprobs, behaviour_logprobs, advantages, delta):
    """The points of a minibatch that keep their gradient (arXiv 2603.01365). All (M,), advantages normalised.

    tv = 1/2 mean |pi_theta/pi_T - 1|. Where tv > delta/2, points with A (log pi_theta - log pi_T) > 0 are dropped:
    their gradient would take pi_theta further from pi_T. Returns (keep, tv), bool (M,) and a scalar.
    """
    assert newlogprobs.shape == learner_logprobs.shape == behaviour_logprobs.shape == advantages.shape
    # a choice the paper leaves open: the samples are mu's, the distance is from pi_T, where the update starts
    log_ratio = newlogprobs - learner_logprobs
    tv = 0.5 * (log_ratio.exp() - 1).abs().mean()
    outward = (tv > delta / 2) & (advantages * log_ratio > 0)
    overflow = (newlogprobs - behaviour_logprobs).exp().isinf()  # no finite gradient, whichever way it points
    return ~(outward | overflow), tv


def policy_loss(newlogprobs, learner_logprobs, behaviour_logprobs, advantages, args):
    """VACO's filtered surrogate, - mean keep (pi_theta/mu) A over the whole minibatch (arXiv 2603.01365).

    All (M,); log-probabilities under pi_theta, pi_T and mu. Returns (loss, metrics), metrics of scalar tensors.
    """
    keep, tv = tv_filter(newlogprobs, learner_logprobs, behaviour_logprobs, advantages, args.delta)
    triggered = (tv > args.delta / 2).float()
    if not args.tv_filter:
        keep, triggered = torch.ones_like(keep), torch.zeros_like(triggered)
    # where, on the input too: 0 times a ratio that overflows would be NaN, in the loss or in its gradient
    ratio = torch.where(keep, newlogprobs - behaviour_logprobs, 0.0).exp()
    loss = -torch.where(keep, ratio * advantages, 0.0).mean()
    filtered, none = 1 - keep.float().mean(), torch.zeros_like(tv)
    return loss, {"tv": tv, "clipfrac": none, "filtered_fraction": filtered, "filter_triggered": triggered}


@torch.no_grad()
def backward_lag(learner_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor) -> dict[str, float]:
    """Distance of pi_T from mu over a batch (B,), with w = pi_T/mu: total variation 1/2 mean |w - 1|, and effective
    sample size (sum w)^2 / (B sum w^2)."""
    log_w = (learner_logprobs - behaviour_logprobs).double()
    log_ess = 2 * log_w.logsumexp(0) - (2 * log_w).logsumexp(0) - math.log(len(log_w))  # w^2 may overflow
    return {"lag/tv_backward": float(0.5 * (log_w.exp() - 1).abs().mean()), "lag/ess": float(log_ess.exp())}


# --------------------------------------------------------------------------------------------------------- rollout


@torch.no_grad()
def rollout(envs, state: dict, policies: dict[str, torch.Tensor], noise: torch.Tensor) -> tuple[dict, list]:
    """Steps N environments T times, each with its own policy. noise: (T, N, A) standard normal.

    `state` goes on from one rollout to the next: obs (N, obs_dim), global_step, and the running episode_return and
    episode_length (N,). Returns (batch, episodes). batch holds float32 tensors (T, N, ...): raw obs and next_obs,
    unclipped actions, behaviour logprobs, raw rewards; and bool terminated and done. episodes lists the
    (global_step, return, length) of those that ended.
    """
    columns = {name: [] for name in ("obs", "mean", "next_obs", "rewards", "terminated", "done")}  # of T entries
    offsets, episodes = policies["log_std"].exp() * noise, []
    for offset in offsets:
        obs = torch.as_tensor(state["obs"], dtype=torch.float32, device=noise.device)  # (N, obs_dim)
        mean = stacked_action_mean(policies, obs)  # (N, A)
        state["obs"], rewards, terminated, truncated, infos = envs.step(env_action(envs, mean + offset))
        done = terminated | truncated
        next_obs = state["obs"].copy()
        state["global_step"] += len(done)
        state["episode_return"] += rewards
        state["episode_length"] += 1
        for i in np.flatnonzero(done):
            next_obs[i] = infos["final_obs"][i]  # state["obs"][i] is already the next episode's first
            episodes.append((state["global_step"], float(state["episode_return"][i]), int(state["episode_length"][i])))
            state["episode_return"][i] = state["episode_length"][i] = 0
        for column, x in zip(columns.values(), (obs, mean, next_obs, rewards, terminated, done), strict=True):
            column.append(x)
    batch = {name: torch.stack(columns.pop(name)) for name in ("obs", "mean")}  # (T, N, ...)
    batch |= {name: torch.as_tensor(np.stack(column), device=noise.device) for name, column in columns.items()}
    batch |= {name: batch[name].float() for name in ("next_obs", "rewards")}
    batch["actions"] = batch["mean"] + offsets
    batch["logprobs"] = gaussian_logprob(batch["actions"], batch.pop("mean"), policies["log_std"])
    return batch, episodes


# ---------------------------------------------------------------------------------------------------------- update


def adam_state(agent: Agent) -> dict[str, torch.Tensor]:
    """All parameters as one vector (P,), in the agent's order, with the two moments of their gradient (P,)."""
    params = nn.utils.parameters_to_vector(agent.parameters()).detach()
    moments = {name: torch.zeros_like(params) for name in ("exp_avg", "exp_avg_sq")}
    return {"params": params} | moments | {name: torch.zeros((), device=params.device) for name in ("step", "lr")}


def gradient_step(agent: Agent, adam: dict, mb: dict[str, torch.Tensor], args: Args) -> tuple[dict, dict]:
    """One step of Adam (arXiv 1412.6980, algorithm 1) on a minibatch of M points, as a pure function.

    Returns (adam, metrics), metrics of scalar tensors, so that nothing waits for the device. `agent` gives the
    structure and the observation statistics; its parameters are those of `adam`.
    """
    theta = adam["params"].detach().requires_grad_()
    pieces = theta.split([p.numel() for p in agent.parameters()])
    params = {name: x.view_as(p) for (name, p), x in zip(agent.named_parameters(), pieces, strict=True)}
    mean, values = torch.func.functional_call(agent, params, mb["obs"])  # (M, A), (M,)
    newlogprobs = gaussian_logprob(mb["actions"], mean, params["log_std"])  # (M,)
    advantages = mb["advantages"]
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    pg_loss, metrics = policy_loss(newlogprobs, mb["learner_logprobs"], mb["logprobs"], advantages, args)
    value_loss = 0.5 * ((values - mb["returns"]) ** 2).mean()
    entropy = (params["log_std"] + 0.5 * math.log(2 * math.pi * math.e)).sum()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * value_loss

    (grad,) = torch.autograd.grad(loss, theta)
    grad_norm = grad.norm()
    grad = grad * (args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1)
    step, beta1, beta2 = adam["step"] + 1, 0.9, 0.999
    exp_avg = beta1 * adam["exp_avg"] + (1 - beta1) * grad
    exp_avg_sq = beta2 * adam["exp_avg_sq"] + (1 - beta2) * grad**2
    denominator = (exp_avg_sq / (1 - beta2**step)).sqrt() + 1e-5
    new_params = adam["params"] - adam["lr"] * (exp_avg / (1 - beta1**step)) / denominator
    adam = {"params": new_params, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": step, "lr": adam["lr"]}

    log_ratio = newlogprobs - mb["learner_logprobs"]
    metrics |= {"approx_kl": (log_ratio.exp() - 1 - log_ratio).mean(), "grad_norm": grad_norm}
    metrics |= {"policy_loss": pg_loss, "value_loss": value_loss, "entropy": entropy}
    return adam, {name: x.detach() for name, x in metrics.items()}


def gradient_steps(agent: Agent, adam: dict, minibatches: list[dict], args: Args) -> tuple[dict, list[dict]]:
    """`gradient_step` on each: calling a compiled graph costs as much as half a step, so it takes several."""
    steps = []
    for mb in minibatches:
        adam, metrics = gradient_step(agent, adam, mb, args)
        steps.append(metrics)
    return adam, steps


def compile_steps():
    """`gradient_steps` as one graph of fused kernels. Raises Refused without what compiling needs."""
    compiler = os.environ.get("CXX", "g++")
    if not (shutil.which(compiler) and Path(sysconfig.get_path("include"), "Python.h").exists()):
        raise Refused(f"--compile needs a C++ compiler ({compiler}) and Python's headers; install them or leave it out")
    torch.compiler.reset()  # graphs of earlier trainings in this process count towards a limit
    torch._dynamo.config.trace_autograd_ops = True  # take autograd.grad into the graph
    return torch.compile(gradient_steps, fullgraph=True, dynamic=False, options={"cpp_wrapper": True})


def update(agent: Agent, adam: dict, batch: dict, args: Args, rng: np.random.Generator, steps_fn=gradient_steps):
    """Epochs x minibatches of gradient steps on a flat batch (B, ...), by `gradient_steps` or its compiled form.

    Gives the agent its new parameters. Returns (adam, metrics), metrics {name: (gradient steps,)}. Raises
    FloatingPointError where a loss or gradient is not finite (looked at once per update).
    """
    names, steps = ("obs", "actions", "logprobs", "learner_logprobs", "advantages", "returns"), []
    orders = [rng.permutation(args.batch_size) for _ in range(args.update_epochs)]  # all, also if target_kl ends early
    graph_length = math.gcd(args.num_minibatches, 4)
    for order in orders:
        b_inds = torch.as_tensor(order, device=batch["obs"].device)
        columns = [batch[name][b_inds].split(args.minibatch_size) for name in names]
        minibatches = [dict(zip(names, column, strict=True)) for column in zip(*columns, strict=True)]
        for i in range(0, args.num_minibatches, graph_length):
            adam, metrics = steps_fn(agent, adam, minibatches[i : i + graph_length], args)
            steps += metrics
        if args.target_kl is not None:
            epoch_kl = torch.stack([step["approx_kl"] for step in steps[-args.num_minibatches :]]).mean()
            if epoch_kl > args.target_kl:
                break
    metrics = {name: torch.stack([step[name] for step in steps]).cpu() for name in steps[0]}
    for name in ("policy_loss", "value_loss", "entropy", "grad_norm"):
        require_finite(name, metrics[name])
    nn.utils.vector_to_parameters(adam["params"], agent.parameters())
    return adam, metrics


def require_finite(name: str, x: torch.Tensor, columns: str | None = None) -> None:
    """Raises FloatingPointError; with `columns`, what x (T, N, ...) has N of, it says in which."""
    if not x.isfinite().all():
        where = f" in {columns} {int((~x.isfinite()).nonzero()[0, 1])}" if columns else ""
        raise FloatingPointError(f"{name} not finite{where}")


# ------------------------------------------------------------------------------------------------------ evaluation

TRAIN_STREAMS = 4  # random streams of `train`: environments, actions, lag, minibatches; evaluation takes the next one
LONGEST_EPISODE = 100_000  # steps; an environment without a time limit may never end an episode


@torch.no_grad()
def evaluate(agent: Agent, env_id: str, episodes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Plays episodes with the current policy, sampled actions and frozen statistics. Returns (returns, lengths), both
    (episodes,). One seed always gives the same starts and noise, and no state of the training is touched.

    Raises TimeoutError for an episode longer than LONGEST_EPISODE.
    """
    env_stream, action_stream = np.random.SeedSequence(seed, spawn_key=(TRAIN_STREAMS,)).spawn(2)
    rng, device = np.random.default_rng(action_stream), agent.log_std.device
    envs = make_envs(env_id, episodes)
    obs, _ = envs.reset(seed=env_stream.generate_state(episodes).tolist())
    returns, lengths, running = np.zeros(episodes), np.zeros(episodes, int), np.ones(episodes, bool)
    while running.any():  # an environment that is done goes on, but only its first episode counts
        mean = agent.action_mean(torch.as_tensor(obs, dtype=torch.float32, device=device))
        noise = torch.as_tensor(rng.standard_normal(mean.shape, dtype=np.float32), device=device)
        obs, rewards, terminated, truncated, _ = envs.step(env_action(envs, mean + agent.log_std.exp() * noise))
        returns += np.where(running, rewards, 0)
        lengths += running
        running &= ~(terminated | truncated)
        if lengths.max() >= LONGEST_EPISODE and running.any():
            raise TimeoutError(f"evaluation episode not ended after {LONGEST_EPISODE:,} steps; use --eval-episodes 0")
    envs.close()
    return returns, lengths


# ----------------------------------------------------------------------------------------------------------- train


def train(args: Args, signals: list | tuple = ()) -> dict:
    """Runs a training and returns what `result.json` holds. Raises Refused where it cannot start as asked, and
    KeyboardInterrupt, with a checkpoint, after the update in which something was put into `signals`."""
    torch.set_num_threads(1)  # the networks are too small to gain from more, and one is reproducible
    args, saved = load_checkpoint(args.resume) if args.resume else (args, None)
    device = open_device(args.device)
    steps_fn = compile_steps() if args.compile else gradient_steps
    streams = np.random.SeedSequence(args.seed).spawn(TRAIN_STREAMS)  # one per purpose: no draw shifts another's
    env_stream, rngs = streams[0], [np.random.default_rng(stream) for stream in streams[1:]]
    action_rng, lag_rng, minibatch_rng = rngs
    envs = make_envs(args.env_id, args.num_envs)
    obs_dim, act_dim = envs.single_observation_space.shape[0], math.prod(envs.single_action_space.shape)

    torch.manual_seed(args.seed)
    agent = Agent(obs_dim, act_dim).to(device)
    adam = adam_state(agent)
    policy_lag = PolicyLag(args.lag, lag_rng, args.lag_mode)
    policy_lag.push(agent)
    reward_scaler = RewardScaler(args.num_envs, args.gamma)
    # a list: an int s would give the environments s, s + 1, ..., so that neighbouring seeds share most of them
    state = {"obs": envs.reset(seed=env_stream.generate_state(args.num_envs).tolist())[0], "global_step": 0}
    state |= {"episode_return": np.zeros(args.num_envs), "episode_length": np.zeros(args.num_envs, int)}
    if saved:
        adam = restore(saved, agent, policy_lag, reward_scaler, rngs, state, envs)
    files = RunFiles(args, saved)
    iteration = first = saved["iteration"] + 1 if saved else 1
    try:
        if not saved:  # from here on the run can be resumed
            files.checkpoint(0, checkpoint(agent, adam, policy_lag, reward_scaler, rngs, state, envs))
        for iteration in range(first, args.num_iterations + 1):
            remaining = 1 - (iteration - 1) / args.num_iterations
            lr = args.learning_rate * (remaining if args.anneal_lr else 1)
            adam["lr"] = torch.tensor(lr, device=device)  # a tensor: a new number would be a new graph

            # act, with lagged snapshots
            policies, ages = policy_lag.draw(args.num_envs)
            noise = action_rng.standard_normal((args.num_steps, args.num_envs, act_dim), dtype=np.float32)
            batch, episodes = rollout(envs, state, policies, torch.as_tensor(noise, device=device))
            for name in ("obs", "next_obs", "rewards", "logprobs"):
                require_finite(name, batch[name], "environment")
            if iteration == 1:  # before this there are no return statistics
                reward_scaler.update(batch["rewards"], batch["done"])

            # what the learner, pi_T, makes of the batch
            with torch.no_grad():
                values, next_values = agent.value(batch["obs"]), agent.value(batch["next_obs"])  # (T, N)
                mean = agent.action_mean(batch["obs"])
                batch["learner_logprobs"] = gaussian_logprob(batch["actions"], mean, agent.log_std)
            require_finite("learner_logprobs", batch["learner_logprobs"], "environment")
            trace = (reward_scaler(batch["rewards"]), values, next_values, batch["terminated"], batch["done"])
            if args.realign:
                log_rhos = batch["learner_logprobs"] - batch["logprobs"]
                discounts = (args.gamma, args.gae_lambda, args.rho_bar, args.c_bar)
                batch["advantages"], batch["returns"] = vtrace(*trace, log_rhos, *discounts)
            else:
                batch["advantages"], batch["returns"] = gae(*trace, args.gamma, args.gae_lambda)
            flat = {name: x.flatten(0, 1) for name, x in batch.items()}  # (B, ...)
            adam, steps = update(agent, adam, flat, args, minibatch_rng, steps_fn)

            # statistics change only now, so that pi_T is one policy from the rollout to the end of its update
            agent.update_obs_stats(flat["obs"])
            for name, x in agent.state_dict().items():
                require_finite(name, x)
            if iteration > 1:
                reward_scaler.update(batch["rewards"], batch["done"])
            policy_lag.push(agent)

            files.log(state["global_step"], lr, flat, values, ages, steps, episodes)
            if iteration * args.num_evals % args.num_iterations < args.num_evals:  # evenly spaced, the last at the end
                files.evaluate(agent, state["global_step"])
            due = args.checkpoint_every and iteration % args.checkpoint_every == 0
            if (due or signals) and iteration < args.num_iterations:
                files.checkpoint(iteration, checkpoint(agent, adam, policy_lag, reward_scaler, rngs, state, envs))
                if signals:
                    raise KeyboardInterrupt(f"stopped after update {iteration}; go on with --resume {files.dir}")
        write_file(files.dir / "model.pt", agent.state_dict())
        return files.close("finished", state["global_step"])
    except (FloatingPointError, TimeoutError) as error:
        return files.close("failed", state["global_step"], error=f"update {iteration}: {error}")
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return files.abandon(f"update {iteration}: {error.strerror}")
        # of the environment, say: its author needs the traceback
        files.close("failed", state["global_step"], error=f"update {iteration}: {error!r}")
        raise
    finally:
        envs.close()


def checkpoint(agent, adam: dict, policy_lag, reward_scaler, rngs: list, state: dict, envs) -> dict:
    """All that a training changes, as tensors, numbers and strings: loading such a file cannot run code."""
    return {
        "agent": agent.state_dict(),
        "adam": adam,
        "snapshots": list(policy_lag.snapshots),
        "reward_scaler": vars(reward_scaler),
        "rngs": [rng.bit_generator.state for rng in rngs],
        "state": {name: torch.as_tensor(x) for name, x in state.items()},
        "episodes": [env.episode() for env in envs.envs],
    }


def restore(saved: dict, agent, policy_lag, reward_scaler, rngs: list, state: dict, envs) -> dict:
    """The reverse of `checkpoint`, in place. Returns adam."""
    device = agent.log_std.device
    agent.load_state_dict(saved["agent"])
    policy_lag.snapshots.clear()
    policy_lag.snapshots.extend({name: x.to(device) for name, x in policy.items()} for policy in saved["snapshots"])
    vars(reward_scaler).update(saved["reward_scaler"])
    for rng, rng_state in zip(rngs, saved["rngs"], strict=True):
        rng.bit_generator.state = rng_state
    state.update({name: x.numpy() if x.dim() else x.item() for name, x in saved["state"].items()})
    for i, (env, episode) in enumerate(zip(envs.envs, saved["episodes"], strict=True)):
        obs = env.replay(**episode)
        if not np.array_equal(obs, state["obs"][i], equal_nan=True):
            print(f"environment {i} does not replay: from here the run is another than before", file=sys.stderr)
            state["obs"][i] = obs
    return {name: x.to(device) for name, x in saved["adam"].items()}


# ------------------------------------------------------------------------------------------------- files of a run


class Refused(ValueError):
    """The run cannot start as asked; the message says what to change. Exit code 2."""


def check(args: Args) -> None:
    """Raises ValueError with a line that says what to change. Every test is positive, so that NaN fails it."""
    if args.resume:
        changed = [field.name for field in fields(args) if getattr(args, field.name) != field.default]
        if changed != ["resume"]:
            raise ValueError(
                f"--resume takes no other flag; leave out {', '.join(x for x in changed if x != 'resume')}"
            )
    rules = [
        ("total_timesteps num_envs num_steps num_minibatches update_epochs", lambda x: 1 <= x < 1e15, "be 1 or more"),
        ("lag eval_episodes num_evals checkpoint_every", lambda x: 0 <= x < 1e15, "be 0 or more"),
        ("gamma gae_lambda", lambda x: 0 <= x <= 1, "lie in [0, 1]"),
        ("learning_rate max_grad_norm", lambda x: 0 < x < math.inf, "be positive and finite"),
        ("delta rho_bar c_bar", lambda x: 0 < x < 1e38, "be positive and finite in float32"),
        ("ent_coef vf_coef", lambda x: 0 <= x < math.inf, "be 0 or more and finite"),
        ("target_kl", lambda x: x is None or 0 < x < math.inf, "be positive and finite, or None"),
        ("seed", lambda x: 0 <= x < 2**32, "lie in 0 .. 4294967295"),
    ]
    for names, allowed, must in rules:
        for name in names.split():
            if not allowed(getattr(args, name)):
                raise ValueError(f"--{name.replace('_', '-')} must {must}, not {getattr(args, name)}")
    if args.total_timesteps < args.batch_size:
        raise ValueError(f"--total-timesteps must be at least one batch: {args.batch_size} (num-envs x num-steps)")
    if args.batch_size % args.num_minibatches or args.minibatch_size < 2:
        fits = [n for n in range(1, min(args.batch_size // 2, 4096) + 1) if args.batch_size % n == 0]
        values = ", ".join(map(str, fits)) or "none; raise --num-envs or --num-steps"
        raise ValueError(
            f"--num-minibatches must cut the batch of {args.batch_size} in equal parts of 2 or more: {values}"
        )


class RunFiles:
    """The folder of a run: config.json, episodes.csv, evals.csv, metrics.csv, TensorBoard events, checkpoint.pt,
    model.pt and, last, result.json. Raises Refused where the folder cannot be used."""

    def __init__(self, args: Args, saved: dict | None):
        self.args = args
        name = re.sub(r"[^\w.-]", "-", f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}")
        resumed, saved = saved is not None, saved["files"] if saved else {"name": name}
        self.name, self.sizes = saved["name"], saved.get("sizes", {})
        self.dir = args.run_dir or Path("runs") / name
        from torch.utils.tensorboard import SummaryWriter  # slow to import, so before the folder exists

        try:
            if not resumed and self.dir.exists() and any(self.dir.iterdir()):
                raise Refused(f"--run-dir {self.dir} is not empty; name a new folder")
            self.wandb = open_wandb(self.name, args) if args.track else None
            self.dir.mkdir(parents=True, exist_ok=True)
            (self.dir / "result.json").unlink(missing_ok=True)  # of a run that failed before it was resumed
            config = run_config(args)
            if resumed:
                first = json.loads((self.dir / "config.json").read_text())
                if any(first[name] != config[name] for name in ("commit", "versions", "machine")):
                    print("resumed with another commit, version or machine: not bit for bit", file=sys.stderr)
                config = first | {"resumed": [*first.get("resumed", []), config]}
            write_json(self.dir / "config.json", config)
        except (OSError, json.JSONDecodeError) as error:
            reason = getattr(error, "strerror", "config.json is damaged")
            raise Refused(f"--run-dir {self.dir} cannot be used ({reason}); name another folder") from error
        self.tensorboard = SummaryWriter(self.dir, purge_step=saved.get("purge_step"))
        self.tables = {}
        self.episodes = self.open_csv("episodes.csv", ["global_step", "episodic_return", "episodic_length"])
        self.evals = self.open_csv("evals.csv", ["global_step", "eval_return", "eval_std", "eval_length"])
        self.metrics = None  # the first row's names are its header
        self.recent_returns = deque(saved.get("recent_returns", ()), maxlen=20)
        self.last_eval = saved.get("last_eval")  # (mean, std)
        self.start, self.eval_seconds = time.perf_counter() - saved.get("seconds", 0), saved.get("eval_seconds", 0.0)

    def open_table(self, name: str):
        """A new file, or the one of a resumed run, cut to the lines that its checkpoint knew."""
        old_size = self.sizes.get(name)
        file = open(self.dir / name, "w" if old_size is None else "r+", newline="", buffering=1)  # noqa: SIM115 (as long as the run)
        self.tables[name] = file
        file.truncate(file.seek(old_size or 0))
        return file

    def open_csv(self, name: str, header: list[str]):
        writer = csv.writer(self.open_table(name))
        if name not in self.sizes:
            writer.writerow(header)
        return writer

    def checkpoint(self, iteration: int, training: dict) -> None:
        """Writes checkpoint.pt; the one before stays beside it, as checkpoint_previous.pt."""
        self.tensorboard.flush()
        files = {"name": self.name, "sizes": {name: file.tell() for name, file in self.tables.items()}}
        files |= {"seconds": time.perf_counter() - self.start, "eval_seconds": self.eval_seconds}
        files |= {"purge_step": int(training["state"]["global_step"]) + 1, "last_eval": self.last_eval}
        files |= {"recent_returns": list(self.recent_returns)}
        args = {name: str(x) if isinstance(x, Path) else x for name, x in asdict(self.args).items()}
        data = {"script": Path(__file__).stem, "args": args, "iteration": iteration, "files": files} | training
        path = self.dir / "checkpoint.pt"
        write_file(path, data, keep=self.dir / "checkpoint_previous.pt")

    def seconds(self) -> float:
        """Seconds of training, without evaluation."""
        return time.perf_counter() - self.start - self.eval_seconds

    def log(self, global_step: int, lr: float, batch: dict, values, ages, steps: dict, episodes: list) -> None:
        """One row of metrics.csv, TensorBoard and W&B from one dict."""
        sps, seconds = global_step / self.seconds(), self.seconds()
        row = {"charts/learning_rate": lr, "charts/SPS": sps, "charts/seconds": seconds}
        row |= {f"losses/{name}": steps[name].mean() for name in ("policy_loss", "value_loss", "entropy")}
        row |= {"losses/approx_kl_mean": steps["approx_kl"].mean(), "losses/approx_kl_max": steps["approx_kl"].max()}
        row |= {"losses/clipfrac": steps["clipfrac"].mean()}
        row |= {
            "losses/explained_variance": 1
            - (batch["returns"] - values.flatten()).var() / batch["returns"].var().clamp(min=1e-8)
        }
        row |= {"losses/grad_norm": steps["grad_norm"].mean(), "lag/age_mean": ages.mean(), "lag/age_max": ages.max()}
        row |= backward_lag(batch["learner_logprobs"], batch["logprobs"])
        row |= {"lag/tv_forward_mean": steps["tv"].mean(), "lag/tv_forward_max": steps["tv"].max()}
        row |= {"lag/tv_forward_last": steps["tv"][-1]}
        row |= {f"lag/{name}": steps[name].mean() for name in ("filtered_fraction", "filter_triggered")}
        row = {name: float(x) for name, x in row.items()}
        self.metrics = self.metrics or self.open_csv("metrics.csv", ["global_step", *row])
        self.metrics.writerow([global_step, *row.values()])
        self.send(row, global_step)
        self.episodes.writerows(episodes)
        for step, episodic_return, length in episodes:
            self.recent_returns.append(episodic_return)
            self.tensorboard.add_scalar("charts/episodic_return", episodic_return, step)
            self.tensorboard.add_scalar("charts/episodic_length", length, step)
        self.progress(global_step, sps)

    def send(self, row: dict, global_step: int) -> None:
        for name, x in row.items():
            self.tensorboard.add_scalar(name, x, global_step)
        if self.wandb:
            self.wandb.log(row | {"global_step": global_step})

    def progress(self, global_step: int, sps: float) -> None:
        """One line, rewritten on a terminal; elsewhere a new one at every tenth of the run."""
        batch_size, total = self.args.batch_size, self.args.batch_size * self.args.num_iterations
        left = (time.perf_counter() - self.start) / global_step * (total - global_step)
        line = f"{global_step:,}/{total:,} steps  {sps:,.0f} SPS  {timedelta(seconds=round(left))} left"
        if self.recent_returns:
            line += f"  return {np.mean(self.recent_returns):.1f} (last {len(self.recent_returns)} episodes)"
        if self.last_eval:
            line += f"  evaluation {self.last_eval[0]:.1f}"
        if sys.stdout.isatty():
            print(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        elif global_step * 10 // total > (global_step - batch_size) * 10 // total:
            print(line, flush=True)

    def evaluate(self, agent: Agent, global_step: int) -> None:
        if self.args.eval_episodes == 0:
            return
        start = time.perf_counter()
        returns, lengths = evaluate(agent, self.args.env_id, self.args.eval_episodes, self.args.seed)
        require_finite("evaluation returns", torch.tensor([returns.mean(), returns.std()]))
        self.last_eval = float(returns.mean()), float(returns.std())
        self.evals.writerow([global_step, *self.last_eval, lengths.mean()])
        self.send({"charts/eval_return": self.last_eval[0], "charts/eval_length": lengths.mean()}, global_step)
        self.eval_seconds += time.perf_counter() - start

    def abandon(self, error: str) -> dict:
        """Stops where nothing more can be written. What was written stays as it is."""
        for file in (*self.tables.values(), self.tensorboard):
            with suppress(OSError):
                file.close()
        error += f"; make room, then --resume {self.dir} goes on from the last checkpoint"
        print(f"failed: {error}", file=sys.stderr)
        return {"status": "failed", "error": error}

    def close(self, status: str, global_step: int, **more: str) -> dict:
        for file in (self.tensorboard, *self.tables.values()):
            file.close()
        if self.wandb:
            self.wandb.finish(exit_code=int(status == "failed"))
        with open(self.dir / "episodes.csv") as file:
            rows = [(int(row["global_step"]), float(row["episodic_return"])) for row in csv.DictReader(file)]
        late = [episodic_return for step, episodic_return in rows if step > 0.9 * global_step]
        eval_return, eval_std = self.last_eval or (None, None)
        result = {"status": status, "seed": self.args.seed, "global_step": global_step}
        result |= {"train_return": float(np.mean(late)) if late else None, "eval_return": eval_return}
        result |= {"eval_std": eval_std, "sps": global_step / self.seconds()}
        result |= {"peak_rss_mb": peak_rss_mb()} | more
        write_json(self.dir / "result.json", result)
        end = "\n" if sys.stdout.isatty() else ""
        print(f"{end}{status}: {more.get('error', self.dir)}", file=sys.stderr if more else sys.stdout)
        return result


def write_file(path: Path, data: dict, keep: Path | None = None) -> None:
    """`data` by torch.save. The file appears whole or not at all; what was there before goes to `keep`."""
    buffer, partial = io.BytesIO(), path.with_suffix(".partial")
    torch.save(data, buffer)
    with open(partial, "wb") as file:
        file.write(buffer.getbuffer())
        os.fsync(file.fileno())
    if keep and path.exists():
        os.replace(path, keep)
    os.replace(partial, path)


def read_file(path: Path, device: torch.device | str) -> dict:
    """What `write_file` wrote. Raises ValueError where a byte of it changed, at which torch.load does not look."""
    with zipfile.ZipFile(path) as file:
        if damaged := file.testzip():
            raise ValueError(f"wrong checksum of {damaged}")
    return torch.load(path, map_location=device, weights_only=True)


def load_checkpoint(run_dir: Path) -> tuple[Args, dict]:
    """The newest checkpoint that can be read, and the arguments of its run. Raises Refused where there is none."""
    status = None
    with suppress(OSError, ValueError, KeyError):
        status = json.loads((run_dir / "result.json").read_text())["status"]
    if status == "finished":
        raise Refused(f"--resume {run_dir}: this run is finished")
    for path in (run_dir / "checkpoint.pt", run_dir / "checkpoint_previous.pt"):
        try:
            saved = read_file(path, "cpu")
            if any((run_dir / name).stat().st_size < size for name, size in saved["files"]["sizes"].items()):
                raise ValueError("a table is shorter than it was")
            if saved["script"] != Path(__file__).stem:
                raise Refused(f"--resume {run_dir}: this run is one of {saved['script']}.py")
            args = Args(**saved["args"] | {"run_dir": run_dir, "resume": None})
            if path.name == "checkpoint_previous.pt":  # the damaged one must not take its place at the next checkpoint
                (run_dir / "checkpoint.pt").unlink(missing_ok=True)
            return args, saved
        except Refused:
            raise
        except (FileNotFoundError, NotADirectoryError):
            continue
        except Exception as error:  # whatever a damaged file leads to
            print(f"{path} is damaged ({error!r:.80}); trying the one before", file=sys.stderr)
    raise Refused(f"--resume {run_dir}: no checkpoint in it can be read; start again in a new folder")


def write_json(path: Path, data: dict) -> None:
    """The file appears whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(data, indent=2, default=str) + "\n")
    os.replace(partial, path)


def peak_rss_mb() -> float | None:
    """Largest resident size of this process so far, in MiB; None on Windows."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def run_config(args: Args) -> dict:
    """What is needed to repeat the run."""
    git = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        commit = subprocess.run([*git, "--exclude=*"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None  # no git, or a copy outside a repository
    packages = ("torch", "numpy", "gymnasium", "mujoco", "tyro", "tensorboard")
    versions = {"python": platform.python_version()} | {
        d.name: d.version for d in distributions() if d.name in packages
    }
    machine = {"platform": platform.platform(), "cores": os.cpu_count()}
    config = {"script": Path(__file__).stem, "args": asdict(args), "command": sys.argv, "commit": commit}
    return config | {"versions": versions, "machine": machine, "torch_threads": torch.get_num_threads()}


def open_device(name: str) -> torch.device:
    try:
        torch.zeros(1, device=name).cpu()  # to the device and back
    except (RuntimeError, AssertionError, ImportError) as error:
        raise Refused(f"--device {name} cannot be used on this machine; try --device cpu") from error
    return torch.device(name)


def open_wandb(name: str, args: Args):
    try:
        import wandb

        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "vaco"),
            id=name,
            name=name,
            resume="allow",
            config=asdict(args) | {"run_dir": str(args.run_dir)},
        )
    except Exception as error:  # not installed, no login, no network
        raise Refused(f"--track needs Weights & Biases (pip install wandb; wandb login): {error}") from error


def show_mujoco_warnings() -> None:
    """Prints MuJoCo's warnings, such as an unstable simulation, instead of MUJOCO_LOG.TXT in the working directory. Not
    the one on the model format that every HalfCheetah gives."""
    try:
        import mujoco
    except ImportError:
        return  # an environment from elsewhere
    except Exception as error:  # a MUJOCO_GL that it does not know, say
        raise Refused(f"MuJoCo does not start: {error}") from error
    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(lambda text: "settotalmass" in text or print(f"MuJoCo: {text}", file=sys.stderr))


def main() -> int:
    args, signals = tyro.cli(Args, description=__doc__.splitlines()[0]), []
    # the thread of TensorBoard's writer: its OSError is raised again where the training writes next
    threading.excepthook = lambda hook: isinstance(hook.exc_value, OSError) or threading.__excepthook__(hook)

    def stop(number, frame):
        if signals:
            raise KeyboardInterrupt
        signals.append(number)
        os.write(2, b"\nstopping after this update; a second signal stops at once\n")  # print could be in mid-print

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        return 0 if train(args, signals)["status"] == "finished" else 1
    except Refused as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(str(error) or "stopped at once; --resume goes on from the last checkpoint", file=sys.stderr)
        return 128 + (signals or [signal.SIGINT])[0]


if __name__ == "__main__":
    sys.exit(main())
