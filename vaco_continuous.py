# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy==2.4.6", "gymnasium[mujoco]==1.4.0", "mujoco==4.0.0", "tyro==1.0.17",
#                 "tensorboard==2.21.0"]
# ///
"""VACO (arXiv 2603.01365) for continuous control under policy lag, in one file. Base script: ppo_continuous.py.

Begin with `train`: a run is rollout, advantages, update, again and again. What differs from PPO:
1. Align, against backward lag: `vtrace`, in place of `gae`, estimates advantages and value targets for pi_T, the
   learner as the update starts, from actions of mu.
2. Filter, against forward lag: `tv_filter` estimates, in every minibatch, the total variation between pi_theta and
   pi_T; where it exceeds delta/2 it drops the points whose gradient would increase it. There is no clip.
3. The surrogate weights every point that is kept by the plain ratio pi_theta/mu.
The paper's text was not at hand, and its abstract and reviews leave choices open: a comment marks those made here.

Three policies: mu acts (an old snapshot), pi_T is the learner when an update starts, pi_theta is being updated.
T steps of N environments are a batch of B = T N points; a minibatch has M of them.
"""

import csv
import json
import math
import os
import random
import shutil
import sys
import sysconfig
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import gymnasium as gym
import mujoco
import numpy as np
import torch
import tyro
from torch import nn


@dataclass
class Args:
    env_id: str = "HalfCheetah-v5"  # gymnasium id of an environment with Box actions, or module:EnvId
    seed: int = 1  # seed of every random stream
    total_timesteps: float = 1e6  # environment steps, rounded down to whole batches
    num_envs: int = 16  # N, environments side by side
    num_steps: int = 128  # T, steps of each per update
    num_minibatches: int = 32  # minibatches of each epoch, of M points; more is more forward lag
    update_epochs: int = 10  # passes over each batch; more is more forward lag
    learning_rate: float = 3e-4  # step size of Adam at the start
    anneal_lr: bool = True  # lower the learning rate linearly to 0
    gamma: float = 0.99  # discount per step
    gae_lambda: float = 0.95  # lambda, decay of the advantage trace per step
    norm_adv: bool = True  # normalise advantages in each minibatch
    ent_coef: float = 0.0  # weight of the entropy bonus, the maximum-entropy term
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # L2 norm to which the gradient is clipped
    target_kl: float | None = None  # end an update after an epoch of a larger mean KL(pi_T, pi_theta)
    lag: int = 0  # L, largest age in updates of the policy that acts; 0 is synchronous
    lag_mode: Literal["uniform", "fixed"] = "uniform"  # age of an environment's policy: drawn from 0..L, or L
    delta: float = 0.2  # the filter acts where the total variation of pi_theta and pi_T exceeds delta/2
    rho_bar: float = 1.0  # largest weight pi_T/mu of a temporal difference in the V-trace targets
    c_bar: float = 1.0  # largest weight pi_T/mu of what follows in the V-trace targets
    realign: bool = True  # estimate advantages for pi_T; --no-realign: for mu, by GAE
    tv_filter: bool = True  # drop points by total variation; --no-tv-filter: keep all
    eval_episodes: int = 10  # episodes per evaluation of the current policy; 0: no evaluation
    num_evals: int = 10  # evaluations, evenly spaced over the run
    device: str = "cpu"  # torch device of the networks: cpu, cuda or cuda:1
    compile: bool = False  # compile gradient steps; with neither flag: where 50,000 repay it
    track: bool = False  # log to Weights & Biases too (pip install wandb)
    run_dir: Path | None = None  # folder of the run; None: runs/{env_id}__{script}__lag{lag}__{seed}__{time}
    checkpoint_every: int = 50  # updates from one checkpoint to the next
    resume: Path | None = None  # folder of a run to go on with; takes no other flag

    def __post_init__(self):
        check(self)
        self.run_dir = self.run_dir and Path(self.run_dir).expanduser()
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // self.num_minibatches
        self.num_iterations = int(self.total_timesteps) // self.batch_size


# -------------------------------------------------------------------------------------------- environments and networks


def make_env(env_id: str) -> gym.Env:
    """One environment with its registered time limit and observations flattened to a vector."""
    # each HalfCheetah would warn of its model's format
    mujoco.set_mju_user_warning(lambda text: "settotalmass" in text or print(f"MuJoCo: {text}", file=sys.stderr))
    env = gym.make(env_id)
    if not isinstance(env.action_space, gym.spaces.Box):
        raise ValueError(f"{env_id} has actions {env.action_space}; continuous control needs a Box")
    if len(env.observation_space.shape or ()) != 1:
        env = gym.wrappers.FlattenObservation(env)
    return RecordEpisode(env)


class RecordEpisode(gym.Wrapper):
    """What the rest relies on, whatever the environment: observations are copies, a reward is a float, infos hold an
    episode's return and length as it ends, and nothing else. Every episode has a seed of its own: with it and the
    actions `restore` plays the episode again. (Copying back MuJoCo's state is not exact.)"""

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        self.seed = int(np.random.SeedSequence(self.seed).generate_state(1)[0]) if seed is None else seed
        self.actions, self.episodic_return = [], 0.0
        for space in (self.unwrapped.action_space, self.unwrapped.observation_space):
            space.seed(self.seed)
        obs, _ = self.env.reset(seed=self.seed, options=options)
        return np.array(obs), {}

    def step(self, action):
        self.actions.append(action.tolist())
        obs, reward, terminated, truncated, _ = self.env.step(action)
        if np.size(reward) != 1:
            raise ValueError(f"{self.spec.id}: a reward of shape {np.shape(reward)} is not one number")
        reward = float(np.asarray(reward).item())
        self.episodic_return += reward
        info = {"return": self.episodic_return, "length": len(self.actions)} if terminated or truncated else {}
        return np.array(obs), reward, bool(terminated), bool(truncated), info


def make_envs(env_id: str, num_envs: int) -> gym.vector.VectorEnv:
    # SAME_STEP: the step that ends an episode also resets. The default spends a step on it, a transition of nothing.
    autoreset_mode = gym.vector.AutoresetMode.SAME_STEP
    return gym.vector.SyncVectorEnv([lambda: make_env(env_id)] * num_envs, autoreset_mode=autoreset_mode)


def env_action(envs: gym.vector.VectorEnv, actions: torch.Tensor) -> np.ndarray:
    """(N, A) sampled actions -> what the environments receive: clipped to their bounds, in their shape and dtype."""
    space = envs.action_space
    return np.clip(actions.cpu().numpy().reshape(space.shape), space.low, space.high).astype(space.dtype)


class RunningMeanStd(nn.Module):
    """Mean and population variance of all samples so far (Chan et al. 1979), in buffers: part of a `state_dict`."""

    def __init__(self, *shape: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def update(self, x: torch.Tensor) -> None:  # (B, *shape)
        x = x.double()
        total = self.count + len(x)
        delta = x.mean(0) - self.mean
        squares = self.var * self.count + x.var(0, correction=0) * len(x) + delta**2 * self.count * len(x) / total
        self.mean.copy_(self.mean + delta * len(x) / total)
        self.var.copy_(squares / total)
        self.count.copy_(total)


class NormalizeReward(nn.Module):
    """Divides rewards by the standard deviation of the running discounted return, and clips them to +-10. As in
    gymnasium, but the return restarts at every episode's end and the statistics change only by `update`."""

    def __init__(self, num_envs: int, gamma: float):
        super().__init__()
        self.gamma = gamma
        self.rms = RunningMeanStd()
        self.register_buffer("returns", torch.zeros(num_envs, dtype=torch.float64))

    def update(self, rewards: torch.Tensor, done: torch.Tensor) -> None:  # both (T, N)
        discounted = []
        for reward, end in zip(rewards, done, strict=True):
            self.returns = self.returns * self.gamma + reward
            discounted.append(self.returns)
            self.returns = torch.where(end, 0.0, self.returns)
        self.rms.update(torch.cat(discounted))

    def forward(self, rewards: torch.Tensor) -> torch.Tensor:
        return (rewards / (self.rms.var + 1e-8).sqrt()).clamp(-10, 10)


def mlp(in_dim: int, out_dim: int, out_std: float) -> nn.Sequential:
    network = nn.Sequential(nn.Linear(in_dim, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out_dim))
    for i, std in ((0, math.sqrt(2)), (2, math.sqrt(2)), (4, out_std)):
        nn.init.orthogonal_(network[i].weight, std)
        nn.init.zeros_(network[i].bias)
    return network


def normalize(obs: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    return ((obs - mean) / torch.sqrt(var + 1e-8)).clamp(-10, 10)


class Agent(nn.Module):
    """Gaussian policy and value function of raw observations. The observation statistics are buffers, so that one
    `state_dict` is the whole policy."""

    def __init__(self, obs_dim: int, act_dim: int):
        super().__init__()
        self.actor, self.critic = mlp(obs_dim, act_dim, out_std=0.01), mlp(obs_dim, 1, out_std=1.0)
        self.log_std = nn.Parameter(torch.zeros(act_dim))
        self.obs_rms = RunningMeanStd(obs_dim)

    def forward(self, norm_obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Action means and values of observations that are normalised: (B, obs_dim) -> (B, A), (B,)"""
        return self.actor(norm_obs), self.critic(norm_obs).squeeze(-1)

    def action_mean(self, obs: torch.Tensor) -> torch.Tensor:  # (B, obs_dim) -> (B, A)
        return self.actor(normalize(obs, self.obs_rms.mean, self.obs_rms.var))

    def value(self, obs: torch.Tensor) -> torch.Tensor:  # (B, obs_dim) -> (B,)
        return self.critic(normalize(obs, self.obs_rms.mean, self.obs_rms.var)).squeeze(-1)


def gaussian_logprob(actions: torch.Tensor, mean: torch.Tensor, log_std: torch.Tensor) -> torch.Tensor:
    """Log-density of whole action vectors, summed over action dimensions: (..., A) -> (...)"""
    return (-0.5 * ((actions - mean) / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


# --------------------------------------------------------------------------------------------------- lag simulator


class PolicyLag:
    """Keeps the learner's last `lag` + 1 snapshots and gives each environment one of them, its behaviour policy mu. A
    snapshot carries its own observation statistics, as a remote actor's copy would."""

    def __init__(self, lag: int, rng: np.random.Generator, mode: str = "uniform"):
        self.snapshots = deque(maxlen=lag + 1)  # oldest first
        self.rng, self.mode = rng, mode

    def push(self, agent: nn.Module) -> None:
        self.snapshots.append({name: x.detach().clone() for name, x in agent.state_dict().items()})

    def draw(self, num_envs: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        """Snapshots stacked to {name: (N, ...)} and their ages (N,) in updates."""
        oldest = len(self.snapshots) - 1
        ages = np.full(num_envs, oldest)
        if self.mode == "uniform":
            ages = self.rng.integers(0, oldest + 1, size=num_envs)
        drawn = [self.snapshots[-1 - age] for age in ages]
        return {name: torch.stack([snapshot[name] for snapshot in drawn]) for name in drawn[0]}, ages


def stacked_action_mean(policies: dict, obs: torch.Tensor) -> torch.Tensor:
    """`Agent.action_mean` of N policies in one batch, each on its own observation: (N, obs_dim) -> (N, A)"""
    x = normalize(obs, policies["obs_rms.mean"], policies["obs_rms.var"]).unsqueeze(1)  # (N, 1, obs_dim)
    for i in (0, 2, 4):
        weight = policies[f"actor.{i}.weight"].transpose(1, 2)  # (N, in, out)
        bias = policies[f"actor.{i}.bias"].unsqueeze(1)  # (N, 1, out)
        x = torch.baddbmm(bias, x if i == 0 else x.tanh(), weight)
    return x.squeeze(1)


# -------------------------------------------------------------------------------------------- advantages and losses


@torch.no_grad()
def vtrace(rewards, values, next_values, terminated, done, log_rhos, gamma, gae_lambda, rho_bar=1.0, c_bar=1.0):
    """V-trace targets v (arXiv 1802.01561, eq. 1, with a decay lambda), and the advantages of pi_T that follow.

    delta_t = r_t + gamma (1 - terminated_t) V(s_{t+1}) - V(s_t)
    rho_t = min(rho_bar, pi_T/mu);   c_t = min(c_bar, pi_T/mu)
    x_t = v_t - V(s_t) = rho_t delta_t + gamma lambda c_t (1 - done_t) x_{t+1}
    A_t = delta_t + gamma lambda (1 - done_t) x_{t+1}

    All (T, N). next_values are those of the true next observation, at an episode's end too. `terminated` stops the
    bootstrap, `done` (terminated or truncated) ends the trace; both bool or 0/1. log_rhos = log pi_T - log mu of whole
    actions; 0 gives exactly GAE (with bars of 1 or more). Returns (advantages, value_targets), both (T, N).
    """
    assert rewards.shape == values.shape == next_values.shape == terminated.shape == done.shape == log_rhos.shape
    deltas = rewards + gamma * torch.where(terminated.bool(), 0.0, next_values) - values
    decay = gamma * gae_lambda * (~done.bool()).to(rewards)
    rhos, cs = log_rhos.exp().clamp(max=rho_bar), log_rhos.exp().clamp(max=c_bar)
    advantages, corrections = torch.zeros_like(rewards), torch.zeros_like(rewards)  # A, x
    next_correction = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        # choices the paper leaves open: no rho_t in A_t, since the surrogate has that ratio; lambda in A_t, as in GAE
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
    # a choice the paper leaves open: the distance is from pi_T, where the update starts, though the samples are mu's
    log_ratio = newlogprobs - learner_logprobs
    tv = 0.5 * (log_ratio.exp() - 1).abs().mean()
    outward = (tv > delta / 2) & (advantages * log_ratio > 0)
    overflow = (newlogprobs - behaviour_logprobs).exp().isinf()  # no finite gradient, whichever way it points
    return ~(outward | overflow), tv


def policy_loss(newlogprobs, learner_logprobs, behaviour_logprobs, advantages, args):
    """VACO's filtered surrogate, - mean keep (pi_theta/mu) A over the whole minibatch (arXiv 2603.01365). All (M,);
    log-probabilities under pi_theta, pi_T and mu. Returns (loss, metrics), metrics of scalar tensors."""
    delta = args.delta if args.tv_filter else math.inf
    keep, tv = tv_filter(newlogprobs, learner_logprobs, behaviour_logprobs, advantages, delta)
    # where, on the input too: 0 times a ratio that overflows would be NaN, in the loss or in its gradient
    ratio = torch.where(keep, newlogprobs - behaviour_logprobs, 0.0).exp()
    loss = -torch.where(keep, ratio * advantages, 0.0).mean()
    filtered, triggered = 1 - keep.float().mean(), (tv > delta / 2).float()
    return loss, {"lag/tv_forward_mean": tv, "lag/filtered_fraction": filtered, "lag/filter_triggered": triggered}


def backward_lag(learner_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor) -> dict:
    """Distance of pi_T from mu over a batch (B,), with w = pi_T/mu: total variation 1/2 mean |w - 1|, and effective
    sample size (sum w)^2 / (B sum w^2)."""
    log_w = (learner_logprobs - behaviour_logprobs).double()
    log_ess = 2 * log_w.logsumexp(0) - (2 * log_w).logsumexp(0) - math.log(len(log_w))  # w^2 may overflow
    return {"lag/tv_backward": float(0.5 * (log_w.exp() - 1).abs().mean()), "lag/ess": float(log_ess.exp())}


# ----------------------------------------------------------------------------------- rollout, update, evaluation, train


@torch.no_grad()
def rollout(envs, state: dict, policies: dict, noise: torch.Tensor) -> tuple[dict, list]:
    """Steps N environments T times, each with its own policy. noise: (T, N, A) standard normal. `state` goes on
    from one rollout to the next: obs (N, obs_dim) and global_step. Returns (batch, episodes). batch holds tensors
    (T, N, ...): raw obs and next_obs, unclipped actions, behaviour logprobs, raw rewards; bool terminated and done.
    episodes lists the (global_step, return, length) of those that ended."""
    T, N, _ = noise.shape
    obs, next_obs = np.zeros((2, T, *envs.observation_space.shape), np.float32)
    rewards = np.zeros((T, N), np.float32)
    terminated, done = np.zeros((2, T, N), bool)
    means, episodes = [], []
    offsets = policies["log_std"].exp() * noise
    for t in range(T):
        obs[t] = state["obs"]
        mean = stacked_action_mean(policies, torch.as_tensor(obs[t], device=noise.device))  # (N, A)
        means.append(mean)
        state["obs"], rewards[t], terminated[t], truncated, infos = envs.step(env_action(envs, mean + offsets[t]))
        state["global_step"] += N
        done[t] = terminated[t] | truncated
        next_obs[t] = state["obs"]
        for i in np.flatnonzero(done[t]):
            next_obs[t, i] = infos["final_obs"][i]  # state["obs"][i] is the next episode's first
            ended = infos["final_info"]
            episodes.append((state["global_step"], float(ended["return"][i]), int(ended["length"][i])))
    arrays = {"obs": obs, "next_obs": next_obs, "rewards": rewards, "terminated": terminated, "done": done}
    batch = {name: torch.as_tensor(x, device=noise.device) for name, x in arrays.items()}
    mean = torch.stack(means)  # (T, N, A)
    batch["actions"] = mean + offsets
    batch["logprobs"] = gaussian_logprob(batch["actions"], mean, policies["log_std"])
    return batch, episodes


def init_adam(agent: Agent) -> dict:
    """All parameters as one vector (P,), in the agent's order, with the two moments of their gradient (P,). Not
    torch.optim.Adam: that does not become one graph with the rest of the step, which --compile gains its speed from."""
    params = nn.utils.parameters_to_vector(agent.parameters()).detach()
    zero = torch.zeros((), device=params.device)
    moments = {"exp_avg": torch.zeros_like(params), "exp_avg_sq": torch.zeros_like(params)}
    return {"params": params, **moments, "step": zero, "lr": zero}


def gradient_step(agent: Agent, opt_state: dict, mb: dict, args: Args) -> tuple[dict, dict]:
    """One step of Adam (arXiv 1412.6980, algorithm 1) on a minibatch of M points, as a pure function: `agent` gives the
    structure, `opt_state` the parameters. Returns (opt_state, losses), losses of scalar tensors: nothing waits for the
    device."""
    theta = opt_state["params"].detach().requires_grad_()
    pieces = theta.split([p.numel() for p in agent.parameters()])
    params = {name: x.view_as(p) for (name, p), x in zip(agent.named_parameters(), pieces, strict=True)}
    mean, newvalues = torch.func.functional_call(agent, params, mb["norm_obs"])  # (M, A), (M,)
    newlogprobs = gaussian_logprob(mb["actions"], mean, params["log_std"])  # (M,)
    advantages = mb["advantages"]
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    pg_loss, losses = policy_loss(newlogprobs, mb["learner_logprobs"], mb["logprobs"], advantages, args)
    value_loss = 0.5 * ((newvalues - mb["returns"]) ** 2).mean()
    entropy = (params["log_std"] + 0.5 * math.log(2 * math.pi * math.e)).sum()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    (grad,) = torch.autograd.grad(loss, theta)
    grad_norm = grad.norm()
    grad = grad * (args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1)
    step = opt_state["step"] + 1
    exp_avg = 0.9 * opt_state["exp_avg"] + 0.1 * grad
    exp_avg_sq = 0.999 * opt_state["exp_avg_sq"] + 0.001 * grad**2
    denominator = (exp_avg_sq / (1 - 0.999**step)).sqrt() + 1e-5
    new_params = opt_state["params"] - opt_state["lr"] * (exp_avg / (1 - 0.9**step)) / denominator
    opt_state = opt_state | {"params": new_params, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": step}

    log_ratio = newlogprobs - mb["learner_logprobs"]
    losses |= {"losses/policy_loss": pg_loss, "losses/value_loss": value_loss, "losses/entropy": entropy}
    losses |= {"losses/approx_kl_mean": (log_ratio.exp() - 1 - log_ratio).mean(), "losses/grad_norm": grad_norm}
    return opt_state, {name: x.detach() for name, x in losses.items()}


def gradient_steps(agent: Agent, opt_state: dict, minibatches: list[dict], args: Args) -> tuple[dict, list[dict]]:
    """`gradient_step` on each: calling a compiled graph costs as much as half a step, so it takes several."""
    all_losses = []
    for mb in minibatches:
        opt_state, losses = gradient_step(agent, opt_state, mb, args)
        all_losses.append(losses)
    return opt_state, all_losses


def update(agent: Agent, opt_state: dict, batch: dict, args: Args, rng: np.random.Generator, steps_fn=gradient_steps):
    """Epochs x minibatches of gradient steps on a flat batch (B, ...), by `gradient_steps` or its compiled form. Gives
    the agent its new parameters. Returns (opt_state, losses), losses {name: (gradient steps,)}. Raises
    FloatingPointError where a loss or gradient is not finite (looked at once per update)."""
    all_losses, steps_per_call = [], math.gcd(args.num_minibatches, 4)
    epochs = [rng.permutation(args.batch_size) for _ in range(args.update_epochs)]  # all, whatever target_kl does
    for b_inds in epochs:
        shuffled = {}
        for name in ("norm_obs", "actions", "logprobs", "learner_logprobs", "advantages", "returns"):
            shuffled[name] = batch[name][b_inds].split(args.minibatch_size)
        minibatches = [{name: x[i] for name, x in shuffled.items()} for i in range(args.num_minibatches)]
        for i in range(0, args.num_minibatches, steps_per_call):
            opt_state, losses = steps_fn(agent, opt_state, minibatches[i : i + steps_per_call], args)
            all_losses += losses
        epoch_kl = [losses["losses/approx_kl_mean"] for losses in all_losses[-args.num_minibatches :]]
        if args.target_kl is not None and torch.stack(epoch_kl).mean() > args.target_kl:
            break
    nn.utils.vector_to_parameters(opt_state["params"], agent.parameters())
    losses = {name: torch.stack([step[name] for step in all_losses]).cpu() for name in all_losses[0]}
    for name in ("policy_loss", "value_loss", "entropy", "grad_norm"):
        require_finite(name, losses[f"losses/{name}"])
    return opt_state, losses


def require_finite(name: str, x: torch.Tensor) -> None:
    if not x.isfinite().all():
        raise FloatingPointError(f"{name} not finite")


@torch.no_grad()
def evaluate(agent: Agent, env_id: str, episodes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Plays episodes with the current policy, sampled actions and frozen statistics. Returns (returns, lengths), both
    (episodes,). One seed always gives the same starts and noise, and no state of the training is touched."""
    env_stream, action_stream = np.random.SeedSequence(seed).spawn(5)[4].spawn(2)  # `train` has the first four
    rng, device = np.random.default_rng(action_stream), agent.log_std.device
    envs = make_envs(env_id, episodes)
    obs, _ = envs.reset(seed=env_stream.generate_state(episodes).tolist())
    returns, lengths, running = np.zeros(episodes), np.zeros(episodes, int), np.ones(episodes, bool)
    while running.any():  # the first episode of each counts
        mean = agent.action_mean(torch.as_tensor(obs, dtype=torch.float32, device=device))
        noise = torch.as_tensor(rng.standard_normal(mean.shape, dtype=np.float32), device=device)
        obs, rewards, terminated, truncated, _ = envs.step(env_action(envs, mean + agent.log_std.exp() * noise))
        returns += np.where(running, rewards, 0)
        lengths += running
        running &= ~(terminated | truncated)
        if lengths.max() >= 1_000_000:
            raise RuntimeError(f"an evaluation episode of {env_id} does not end")
    envs.close()
    return returns, lengths


def train(args: Args, run_dir: Path, saved: dict | None = None) -> Agent:
    """Runs a training, or goes on from a checkpoint, and returns the trained agent. Files in run_dir: episodes.csv,
    evals.csv, metrics.csv, TensorBoard events, checkpoint.pt and, at the end, model.pt."""
    torch.set_num_threads(1)  # small networks gain nothing from more
    device = torch.device(args.device)
    steps_fn = gradient_steps
    if args.compile:  # several steps are one graph of fused kernels, autograd.grad included
        torch._dynamo.config.trace_autograd_ops = True
        steps_fn = torch.compile(gradient_steps, fullgraph=True, dynamic=False, options={"cpp_wrapper": True})
    streams = np.random.SeedSequence(args.seed).spawn(4)  # one for each purpose
    action_rng, lag_rng, minibatch_rng = rngs = [np.random.default_rng(stream) for stream in streams[1:]]
    envs = make_envs(args.env_id, args.num_envs)
    act_dim = math.prod(envs.single_action_space.shape)

    for seed in (random.seed, np.random.seed, torch.manual_seed):  # torch: the first weights
        seed(args.seed)
    agent = Agent(envs.single_observation_space.shape[0], act_dim).to(device)
    opt_state = init_adam(agent)
    policy_lag = PolicyLag(args.lag, lag_rng, args.lag_mode)
    policy_lag.push(agent)
    normalize_reward = NormalizeReward(args.num_envs, args.gamma).to(device)
    # a list: an int s would give the environments s, s + 1, ..., so that neighbouring seeds share most of them
    obs, _ = envs.reset(seed=streams[0].generate_state(args.num_envs).tolist())
    state = {"obs": obs, "global_step": 0, "iteration": 0, "seconds": 0.0}
    if saved:
        opt_state = restore(saved, agent, policy_lag, normalize_reward, rngs, state, envs)
    log = Log(run_dir, state["global_step"], args.track)

    for iteration in range(state["iteration"] + 1, args.num_iterations + 1):
        start = time.perf_counter()
        lr = args.learning_rate * (1 - (iteration - 1) / args.num_iterations if args.anneal_lr else 1)
        opt_state["lr"] = torch.tensor(lr, device=device)  # a tensor: a new number would be a new graph
        policies, ages = policy_lag.draw(args.num_envs)  # act, with lagged snapshots
        noise = action_rng.standard_normal((args.num_steps, args.num_envs, act_dim), dtype=np.float32)
        batch, episodes = rollout(envs, state, policies, torch.as_tensor(noise, device=device))
        if iteration == 1:  # there are no return statistics yet
            normalize_reward.update(batch["rewards"], batch["done"])

        with torch.no_grad():  # what the learner, pi_T, makes of the batch
            batch["norm_obs"] = normalize(batch["obs"], agent.obs_rms.mean, agent.obs_rms.var)
            mean, values = agent(batch["norm_obs"])  # (T, N, A), (T, N)
            next_values = agent.value(batch["next_obs"])
        batch["learner_logprobs"] = gaussian_logprob(batch["actions"], mean, agent.log_std.detach())
        for name, x in batch.items():
            require_finite(name, x)
        rewards = normalize_reward(batch["rewards"])
        terminated, done = batch["terminated"], batch["done"]
        gamma, gae_lambda = args.gamma, args.gae_lambda
        log_rhos = batch["learner_logprobs"] - batch["logprobs"]
        if not args.realign:
            log_rhos = torch.zeros_like(log_rhos)
        batch["advantages"], batch["returns"] = vtrace(
            rewards, values, next_values, terminated, done, log_rhos, gamma, gae_lambda, args.rho_bar, args.c_bar
        )
        flat = {name: x.flatten(0, 1) for name, x in batch.items()}  # (B, ...)
        opt_state, losses = update(agent, opt_state, flat, args, minibatch_rng, steps_fn)

        # statistics change only now, so that pi_T is one policy from the rollout to the end of its update
        agent.obs_rms.update(flat["obs"])
        require_finite("parameters", opt_state["params"])
        if iteration > 1:
            normalize_reward.update(batch["rewards"], batch["done"])
        policy_lag.push(agent)
        state["iteration"] = iteration
        state["seconds"] += time.perf_counter() - start

        step, sps = state["global_step"], state["global_step"] / state["seconds"]
        row = {"global_step": step, "charts/learning_rate": lr, "charts/SPS": sps, "charts/seconds": state["seconds"]}
        log.write("metrics", row | metrics(flat, values.flatten(), ages, losses))
        for at, episodic_return, length in episodes:
            log.write("episodes", {"global_step": at, "episodic_return": episodic_return, "episodic_length": length})
        minutes = state["seconds"] / iteration * (args.num_iterations - iteration) / 60
        progress = f"{step:,} of {args.total_timesteps:,.0f} steps, {sps:,.0f} SPS, {minutes:.1f} minutes left"
        if episodes:
            print(f"{progress}, return {np.mean([x for _, x, _ in episodes]):.1f}", flush=True)
        if args.eval_episodes and iteration * args.num_evals % args.num_iterations < args.num_evals:  # evenly spaced
            returns, lengths = evaluate(agent, args.env_id, args.eval_episodes, args.seed)
            require_finite("evaluation returns", torch.as_tensor(returns))
            row = {"global_step": step, "eval_return": returns.mean(), "eval_std": returns.std()}
            log.write("evals", row | {"eval_length": lengths.mean()})
            print(f"{progress}, evaluation {returns.mean():.1f}", flush=True)
        if iteration % args.checkpoint_every == 0:
            log.tensorboard.flush()
            data = {  # all that changes, as tensors, numbers and strings: loading it runs no code
                "agent": agent.state_dict(),
                "opt_state": opt_state,
                "snapshots": list(policy_lag.snapshots),
                "normalize_reward": normalize_reward.state_dict(),
                "rngs": [rng.bit_generator.state for rng in rngs],
                "state": state | {"obs": state["obs"].tolist()},
                "episodes": [(env.seed, env.actions, env.episodic_return) for env in envs.envs],
            }
            save(data, run_dir / "checkpoint.pt")
    envs.close()
    log.tensorboard.close()
    save(agent.state_dict(), run_dir / "model.pt")
    return agent


# ------------------------------------------------------------------------------------------------- files of a run


def check(args: Args) -> None:
    """Raises ValueError, exit code 2, with a line that says what to change. NaN lies in no range."""
    ranges = [
        ("num_envs num_steps num_minibatches update_epochs checkpoint_every", 1, 1e15),
        ("total_timesteps", args.num_envs * args.num_steps, 1e15),
        ("seed lag ent_coef vf_coef eval_episodes num_evals", 0, 2**32 - 1),
        ("gamma gae_lambda", 0, 1),
        ("learning_rate max_grad_norm target_kl delta rho_bar c_bar", 1e-30, 1e30),
    ]
    for names, low, high in ranges:
        for name in names.split():
            x = getattr(args, name)
            if not (x is None or low <= x <= high):
                raise ValueError(f"--{name.replace('_', '-')} must lie in {low:g} .. {high:g}, not {x}")
    batch_size = args.num_envs * args.num_steps
    if batch_size % args.num_minibatches or batch_size < 2 * args.num_minibatches:
        raise ValueError(f"--num-minibatches must cut the batch of {batch_size} in equal parts of 2 or more")


class Log:
    """The tables of a run, one CSV file each, and the same numbers as curves for TensorBoard. What a resumed run had
    written after its checkpoint, made at `last_step`, is cut off."""

    def __init__(self, run_dir: Path, last_step: int, track: bool):
        from torch.utils.tensorboard import SummaryWriter  # takes seconds, and nobody else needs it

        if track:
            import wandb

            wandb.init(project="vaco", name=run_dir.name, dir=run_dir, sync_tensorboard=True)
        self.run_dir, self.last_step, self.tables = run_dir, last_step, {}
        self.tensorboard = SummaryWriter(run_dir, purge_step=last_step + 1)

    def write(self, table: str, row: dict[str, float]) -> None:
        """The first item of the row is the step."""
        if table not in self.tables:
            file = self.tables[table] = open(self.run_dir / f"{table}.csv", "a+", newline="", buffering=1)
            file.seek(0)
            *lines, _ = file.read().split("\n")  # after a full disk the last may be half a line
            kept = [x + "\n" for x in lines if not x[:1].isdigit() or int(x.split(",")[0]) <= self.last_step]
            file.truncate(len("".join(kept)))
            if not kept:
                csv.writer(file).writerow(row)
        csv.writer(self.tables[table]).writerow(row.values())
        (_, step), *items = row.items()
        for name, x in items:
            self.tensorboard.add_scalar(name if "/" in name else f"charts/{name}", x, step)


def metrics(batch: dict, values: torch.Tensor, ages: np.ndarray, losses: dict) -> dict[str, float]:
    """What is logged of an update: of its flat batch, and of its gradient steps."""
    row = {name: x.mean() for name, x in losses.items()}
    row["losses/approx_kl_max"] = losses["losses/approx_kl_mean"].max()
    row["losses/explained_variance"] = 1 - (batch["returns"] - values).var() / batch["returns"].var().clamp(min=1e-8)
    row["lag/tv_forward_max"] = losses["lag/tv_forward_mean"].max()
    row["lag/tv_forward_last"] = losses["lag/tv_forward_mean"][-1]
    row["lag/age_mean"], row["lag/age_max"] = ages.mean(), ages.max()
    row |= backward_lag(batch["learner_logprobs"], batch["logprobs"])
    return {name: float(x) for name, x in row.items()}


def save(data: dict, path: Path) -> None:
    """The file appears whole or not at all, even if the process is killed meanwhile or the power fails."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with open(partial, "wb") as file:
        torch.save(data, file)
        os.fsync(file.fileno())
    os.replace(partial, path)


def restore(saved: dict, agent, policy_lag, normalize_reward, rngs: list, state: dict, envs) -> dict:
    """Puts a checkpoint back, in place: the environments by playing their episodes again. Returns opt_state."""
    agent.load_state_dict(saved["agent"])
    policy_lag.snapshots = deque(saved["snapshots"], maxlen=policy_lag.snapshots.maxlen)
    normalize_reward.load_state_dict(saved["normalize_reward"])
    for rng, rng_state in zip(rngs, saved["rngs"], strict=True):
        rng.bit_generator.state = rng_state
    exact = True
    for i, (seed, actions, episodic_return) in enumerate(saved["episodes"]):
        env = envs.envs[i]
        state["obs"][i], _ = env.reset(seed=seed)
        for action in actions:
            state["obs"][i], *_ = env.step(np.array(action, env.action_space.dtype))
        exact &= env.episodic_return == episodic_return
    if not (exact and np.array_equal(state["obs"], saved["state"]["obs"], equal_nan=True)):
        print("an environment does not replay: from here the run is another than before", file=sys.stderr)
    state.update(saved["state"] | {"obs": state["obs"]})
    return saved["opt_state"]


def main() -> None:
    try:  # are flags, environment, device and folder good?
        if {"True", "False"} & set(sys.argv):
            raise ValueError("write --anneal-lr or --no-anneal-lr, without a value")
        args, saved = tyro.cli(Args, description=__doc__.splitlines()[0]), None
        if args.resume:
            if args != Args(resume=args.resume):
                raise ValueError("--resume takes no other flag")
            run_dir = path.parent if (path := args.resume.expanduser()).is_file() else path
            args = Args(**json.loads((run_dir / "config.json").read_text())["args"])
            saved = torch.load(run_dir / "checkpoint.pt", map_location=args.device, weights_only=True)
        if make_env(args.env_id).spec.max_episode_steps is None:
            print(f"{args.env_id} has no time limit: evaluation needs episodes that end")
        torch.zeros(1, device=args.device)
        if not saved:
            if not {"--compile", "--no-compile"} & set(sys.argv):
                steps = args.num_iterations * args.update_epochs * args.num_minibatches
                header = Path(sysconfig.get_path("include"), "Python.h")
                args.compile = steps >= 50_000 and header.exists() and shutil.which("g++") is not None
            env_id = args.env_id.replace("/", "-").replace(":", "-")
            default = Path(f"runs/{env_id}__{Path(__file__).stem}__lag{args.lag}__{args.seed}__{int(time.time())}")
            numbered = (Path(f"{default}-{i}") for i in range(2, 10_000))  # runs may start in the same second
            run_dir = args.run_dir or next(path for path in (default, *numbered) if not path.exists())
            run_dir.mkdir(parents=True)
            config = {"script": Path(__file__).stem, "args": asdict(args)}
            (run_dir / "config.json").write_text(json.dumps(config, indent=2, default=str))
    except Exception as error:
        print(f"{Path(__file__).name}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    print(f"{'compiled' if args.compile else 'not compiled'} (--compile, --no-compile); files in {run_dir}")
    train(args, run_dir, saved)
    print(f"finished: {run_dir}")


if __name__ == "__main__":
    main()
