"""What enters and leaves the environments: episodes, last observations, seeds, bounds, statistics."""

import math
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
import toy_envs
from helpers import ENVIRONMENT, ROOT, SMALL, flags, read_csv, read_model, same_tensors, spy, start, train

MUJOCO = [
    "Ant",
    "HalfCheetah",
    "Hopper",
    "Humanoid",
    "HumanoidStandup",
    "InvertedDoublePendulum",
    "InvertedPendulum",
    "Reacher",  # codespell:ignore
    "Swimmer",
    "Walker2d",
]


def one_rollout(script, env_id, num_envs, num_steps, log_std=0.0):
    """(batch, episodes, envs) of a fresh agent."""
    envs = script.make_envs(f"toy_envs:{env_id}-v0", num_envs)
    act_dim = envs.single_action_space.shape[0]
    agent = script.Agent(envs.single_observation_space.shape[0], act_dim)
    agent.log_std.data.fill_(log_std)
    lag = script.PolicyLag(0, np.random.default_rng(0))
    lag.push(agent)
    policies, _ = lag.draw(num_envs)
    noise = torch.randn(num_steps, num_envs, act_dim)
    return *script.rollout(envs, start(script, envs, seed=1), policies, noise), envs


# ------------------------------------------------------------------------------------------------------- episodes


@pytest.mark.parametrize("env_id", ["ThreeStep", "ThreeStepTimeLimit", "ThreeStepBoth"])
def test_every_episode_is_logged(script, env_id, tmp_path):
    """2 environments, 12 steps in two updates, episodes of 3: 8 of them, two at a time. None is cut by an update."""
    args = {"num_envs": 2, "num_steps": 6, "num_minibatches": 1, "num_evals": 0}
    train(script, tmp_path / "run", updates=2, env_id=f"toy_envs:{env_id}-v0", **args)
    rows = read_csv(tmp_path / "run" / "episodes.csv")
    assert [row["global_step"] for row in rows] == [6, 6, 12, 12, 18, 18, 24, 24]
    assert {(row["episodic_return"], row["episodic_length"]) for row in rows} == {(3, 3)}


def test_an_episode_goes_on_into_the_next_rollout(script, tmp_path):
    """12 steps in three updates of 4."""
    args = {"num_envs": 2, "num_steps": 4, "num_evals": 0}
    train(script, tmp_path / "run", updates=3, env_id="toy_envs:ThreeStep-v0", **args)
    rows = read_csv(tmp_path / "run" / "episodes.csv")
    assert [(row["episodic_return"], row["episodic_length"]) for row in rows] == [(3, 3)] * 8


@pytest.mark.parametrize("env_id", ["ThreeStep", "ThreeStepTimeLimit", "ThreeStepBoth"])
def test_every_transition_is_real_and_knows_its_last_observation(script, env_id):
    """Observed is the number of steps since the reset: after 2 comes 3, not the 0 of the next episode. No transition
    with reward 0 is added at a reset."""
    batch, episodes, _ = one_rollout(script, env_id, num_envs=2, num_steps=7)
    for i in range(2):
        assert batch["obs"][:, i, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]
        assert batch["next_obs"][:, i, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]
        assert batch["rewards"][:, i].tolist() == [1] * 7
        assert batch["done"][:, i].tolist() == [False, False, True, False, False, True, False]
        assert batch["terminated"][:, i].tolist() == [
            end and env_id != "ThreeStepTimeLimit" for end in batch["done"][:, i].tolist()
        ]
    assert episodes == [(6, 3.0, 3), (6, 3.0, 3), (12, 3.0, 3), (12, 3.0, 3)]


def test_a_batch_is_float32_and_time_major(script):
    batch, _, _ = one_rollout(script, "Noise", num_envs=4, num_steps=5)
    shapes = {name: tuple(x.shape) for name, x in batch.items()}
    assert shapes == {
        "obs": (5, 4, 3),
        "actions": (5, 4, 2),
        "logprobs": (5, 4),
        "next_obs": (5, 4, 3),
        "rewards": (5, 4),
        "terminated": (5, 4),
        "done": (5, 4),
    }
    flags = {name for name, x in batch.items() if x.dtype == torch.bool}
    assert flags == {"terminated", "done"}
    assert all(x.dtype == torch.float32 for name, x in batch.items() if name not in flags)


# ---------------------------------------------------------------------------------------------------------- seeds


def test_environments_and_seeds_start_differently(script, tmp_path):
    """Neighbouring seeds too: no environment of one is an environment of the other."""
    starts = []
    for seed in (1, 2, 3):
        toy_envs.Noise.forget()
        train(script, tmp_path / str(seed), updates=1, env_id="toy_envs:Noise-v0", num_envs=8, seed=seed)
        starts += toy_envs.Noise.seeds
    assert len(starts) == 3 * (8 + 2)  # the training's, and the evaluation's two episodes
    assert len(set(starts)) == len(starts)


@pytest.mark.parametrize("env_id", ["Hopper-v5", "HalfCheetah-v5"])
def test_first_observations_differ(script, env_id, monkeypatch, tmp_path):
    calls, args = spy(monkeypatch, script, "rollout"), {"num_envs": 4, "num_steps": 2, "num_evals": 0}
    for seed in (1, 2, 1):
        train(script, tmp_path / str(len(calls)), updates=1, env_id=env_id, seed=seed, **args)
    first = [batch["obs"][0] for _, (batch, _) in calls]
    assert len({tuple(row.tolist()) for obs in first[:2] for row in obs}) == 8
    assert torch.equal(first[0], first[2])


def test_evaluation_starts_are_its_own_and_the_same_every_time(script):
    agent, starts = script.Agent(3, 2), []
    for seed in (1, 1, 2):
        toy_envs.Noise.forget()
        script.evaluate(agent, "toy_envs:Noise-v0", episodes=5, seed=seed)
        starts.append(list(toy_envs.Noise.seeds))
    assert starts[0] == starts[1]
    assert len(set(starts[0] + starts[2])) == 10


# -------------------------------------------------------------------------------------------------------- actions


def test_actions_are_clipped_for_the_environment_and_stored_as_sampled(script):
    toy_envs.Noise.forget()
    batch, _, envs = one_rollout(script, "Noise", num_envs=4, num_steps=50)
    received = np.array(toy_envs.Noise.actions).reshape(50, 4, 2)
    low, high = envs.single_action_space.low, envs.single_action_space.high
    assert received.dtype == envs.single_action_space.dtype
    assert received.min() == low[0] == np.float32(-0.1)
    assert received.max() == high[0] == np.float32(0.1)
    stored = batch["actions"].numpy()
    assert np.abs(stored).max() > 1
    inside = np.abs(stored) < 0.1
    assert 0 < inside.mean() < 0.5
    assert np.array_equal(received[inside], stored[inside])
    assert np.array_equal(np.sign(received), np.sign(stored))


def test_actions_have_the_shape_type_and_bounds_of_their_space(script, tmp_path):
    """2 x 2 and float64, with bounds that are not about 0, some infinite; in one environment alone."""
    toy_envs.Matrix.forget()
    train(script, tmp_path / "run", updates=1, env_id="toy_envs:Matrix-v0", num_envs=1, num_steps=64, num_evals=0)
    received, space = np.array(toy_envs.Matrix.actions), toy_envs.Matrix.action_space
    assert (received.shape, received.dtype) == ((64, 2, 2), np.float64)
    assert all(space.contains(action) for action in received)
    assert received.min(0)[0].tolist() == [0.5, -2]
    assert received.max(0)[0].tolist() == [0.7, -1]
    assert (received[:, 1, 1] < -1).any()
    assert read_model(tmp_path / "run")["obs_rms.mean"].shape == read_model(tmp_path / "run")["log_std"].shape == (4,)


# --------------------------------------------------------------------------------------------------- observations


def test_dict_observations_are_flattened_and_then_normalised(script, monkeypatch, tmp_path):
    calls = spy(monkeypatch, script, "update")
    train(script, tmp_path / "run", updates=5, env_id="toy_envs:DictCounter-v0")
    seen = torch.cat([arguments[2]["obs"] for arguments, _ in calls]).double().numpy()
    assert seen.shape == (5 * 2 * 8, 3)  # the count, and the position's two coordinates
    assert set(seen[:, 0]) == {0, 1, 2}
    assert np.abs(seen[:, 1:] - 1000).max() < 300
    saved = read_model(tmp_path / "run")
    assert saved["obs_rms.mean"].numpy() == pytest.approx(seen.mean(0), rel=1e-5)
    assert saved["obs_rms.var"].numpy() == pytest.approx(seen.var(0), rel=1e-4)


def test_observation_statistics_are_those_of_all_observations_seen(script):
    agent, seen = script.Agent(3, 2), []
    for size in (16, 1, 200, 16):
        obs = torch.tensor([0.0, 5.0, -1000.0]) + torch.tensor([1.0, 30.0, 0.5]) * torch.randn(size, 3)
        agent.obs_rms.update(obs)
        seen = np.concatenate([seen, obs.numpy()]) if len(seen) else obs.numpy()
        assert agent.obs_rms.mean.numpy() == pytest.approx(seen.mean(0, dtype=float), rel=1e-5, abs=1e-5)
        assert agent.obs_rms.var.numpy() == pytest.approx(seen.var(0, dtype=float), rel=1e-3)
        assert agent.obs_rms.count == len(seen)


def test_observations_are_normalised_and_clipped(script):
    agent = script.Agent(3, 2)
    fresh = script.Agent(3, 2)  # statistics of mean 0 and variance 1
    fresh.load_state_dict(agent.state_dict())
    agent.obs_rms.update(torch.tensor([[1.0, -2.0, 10.0], [3.0, 2.0, 30.0]]))  # mean 2, 0, 20; std 1, 2, 10
    raw, normal = torch.tensor([[4.0, -1.0, 1e6], [2.0, 0.0, -1e6]]), torch.tensor([[2.0, -0.5, 10], [0, 0, -10]])
    torch.testing.assert_close(agent.action_mean(raw), fresh.action_mean(normal))
    torch.testing.assert_close(agent.value(raw), fresh.value(normal))
    mean, values = agent(script.normalize(raw, agent.obs_rms.mean, agent.obs_rms.var))  # as in a gradient step
    assert torch.equal(mean, agent.action_mean(raw))
    assert torch.equal(values, agent.value(raw))


def test_statistics_change_only_after_the_update(script, monkeypatch, tmp_path):
    """During update k they are those of the k - 1 batches before; the first finds mean 0 and variance 1."""
    calls = spy(monkeypatch, script, "update")
    train(script, tmp_path / "run", updates=4, env_id="toy_envs:Noise-v0", lag=1)
    seen = np.empty((0, 3))
    for (agent, _, batch, *_), _ in calls:
        mean, var = (seen.mean(0), seen.var(0)) if len(seen) else (np.zeros(3), np.ones(3))
        assert agent.obs_rms.count == len(seen)
        assert agent.obs_rms.mean.numpy() == pytest.approx(mean, rel=1e-5, abs=1e-5)
        assert agent.obs_rms.var.numpy() == pytest.approx(var, rel=1e-3)
        seen = np.concatenate([seen, batch["obs"].double().numpy()])


def test_evaluation_changes_nothing(script):
    agent = script.Agent(3, 2)
    agent.obs_rms.update(torch.randn(20, 3))
    before = {name: x.clone() for name, x in agent.state_dict().items()}
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    results = [script.evaluate(agent, "toy_envs:Noise-v0", episodes=4, seed=7) for _ in range(2)]
    assert same_tensors(agent.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    assert np.array_equal(results[0], results[1])


@pytest.mark.parametrize("env_id", ["ThreeStep", "ThreeStepTimeLimit"])
def test_evaluation_counts_whole_episodes(script, env_id):
    returns, lengths = script.evaluate(script.Agent(1, 1), f"toy_envs:{env_id}-v0", episodes=5, seed=1)
    assert returns.tolist() == lengths.tolist() == [3] * 5


def test_evaluation_counts_the_first_episode_of_each_environment(script):
    """Episodes of random length and reward, which a plain gymnasium loop repeats from the same seeds."""
    toy_envs.Noise.forget()
    returns, lengths = script.evaluate(script.Agent(3, 2), "toy_envs:Noise-v0", episodes=6, seed=1)
    env, expected = gym.make("toy_envs:Noise-v0"), []
    for seed in list(toy_envs.Noise.seeds):
        env.reset(seed=seed)
        rewards, done = [], False
        while not done:
            _, reward, terminated, truncated, _ = env.step(np.zeros(2, np.float32))
            rewards.append(reward)
            done = terminated or truncated
        expected.append((sum(rewards), len(rewards)))
    assert list(zip(returns.tolist(), lengths.tolist(), strict=True)) == expected
    assert len(set(lengths.tolist())) > 1


def test_a_saved_policy_acts_the_same_in_a_new_process(vaco, monkeypatch, tmp_path):
    """Its observation statistics are saved with it. A fixed raw observation gives the same mean, to the bit."""
    calls = spy(monkeypatch, vaco, "evaluate")
    train(vaco, tmp_path / "run", updates=3, env_id="Hopper-v5", num_steps=32)
    trained = calls[-1][0][0]
    assert trained.obs_rms.var.min() < 0.5
    code = f"""
import torch
from vaco_continuous import Agent
agent = Agent(11, 3)
agent.load_state_dict(torch.load({str(tmp_path / "run" / "model.pt")!r}, weights_only=True))
print([x.hex() for x in agent.action_mean(torch.linspace(-2, 2, 11)[None])[0].tolist()])
"""
    command, env = [sys.executable, "-c", code], ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    printed = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout.strip()
    mean = trained.action_mean(torch.linspace(-2, 2, 11)[None])[0]
    assert printed == str([x.hex() for x in mean.tolist()])


# -------------------------------------------------------------------------------------------------------- rewards


def test_reward_normaliser_restarts_at_episode_ends_and_counts_real_transitions(script):
    """Three updates of 5 steps of 2 environments, against the discounted sums written out. Episodes run on from one
    update to the next, and end at different steps."""
    gamma, normalize_reward = 0.9, script.NormalizeReward(2, 0.9)
    rewards, done = 3 * torch.randn(15, 2), torch.rand(15, 2) < 0.25
    sums = []
    for n in range(2):
        episode = []
        for reward, end in zip(rewards[:, n].tolist(), done[:, n].tolist(), strict=True):
            episode.append(reward)
            sums.append((len(sums) % 15, sum(gamma**k * r for k, r in enumerate(reversed(episode)))))
            episode = [] if end else episode
    for update in (1, 2, 3):
        rows = slice(5 * update - 5, 5 * update)
        normalize_reward.update(rewards[rows], done[rows])
        known = [x for step, x in sums if step < 5 * update]
        assert normalize_reward.rms.count == len(known) == 10 * update
        expected = np.clip(rewards.numpy() / np.std(known), -10, 10)
        assert normalize_reward(rewards).numpy() == pytest.approx(expected, rel=1e-5)


def test_scaled_rewards_are_bounded_and_keep_their_sign(script):
    normalize_reward = script.NormalizeReward(1, 0.99)
    assert normalize_reward(torch.tensor([-3.0, 0, 0.5, 1e6])).tolist() == pytest.approx(
        [-3, 0, 0.5, 10]
    )  # variance 1 at first
    assert normalize_reward(torch.tensor([-1e6])).tolist() == [-10]


# --------------------------------------------------------------------------------------------- real environments


@pytest.mark.parametrize("task", MUJOCO)
def test_mujoco_tasks_train(vaco, task, main, tmp_path):
    args = SMALL | {"num_steps": 16, "lag": 1, "eval_episodes": 1 if task.startswith("Inverted") else 0}
    words = flags(**args, env_id=f"{task}-v5", total_timesteps=64, run_dir="run")
    code, _, err = main(vaco, *words)
    assert (code, err) == (0, "")  # MuJoCo's warnings of its own files are left out
    assert [row["global_step"] for row in read_csv(tmp_path / "cwd" / "run" / "metrics.csv")] == [32, 64]
    assert all(x.isfinite().all() for x in read_model(tmp_path / "cwd" / "run").values())
    assert [path.name for path in (tmp_path / "cwd").iterdir()] == ["run"]  # no MUJOCO_LOG.TXT


def test_evaluation_samples_its_actions(script):
    """From the policy's own Gaussian: spread exp(log_std) about a mean of 0."""
    toy_envs.Noise.forget()
    agent = script.Agent(3, 2)
    with torch.no_grad():
        agent.log_std.fill_(math.log(0.02))
        agent.actor[4].weight.zero_()
    script.evaluate(agent, "toy_envs:Noise-v0", episodes=64, seed=1)
    assert np.std(toy_envs.Noise.actions) == pytest.approx(0.02, rel=0.2)
