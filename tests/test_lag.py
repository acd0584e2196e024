"""The lag simulator, and the lag a training really has."""

import copy
import math

import numpy as np
import pytest
import torch
import toy_envs
from helpers import read_csv, read_model, spy, start, train


def policies(script, count: int, obs_dim=3, act_dim=2) -> list:
    """Agents that differ in every parameter and in their observation statistics."""
    agents = [script.Agent(obs_dim, act_dim) for _ in range(count)]
    for i, agent in enumerate(agents):
        agent.actor[4].weight.data *= 50  # the last layer starts small
        agent.actor[4].bias.data.normal_()
        agent.log_std.data.normal_(std=0.3)
        agent.obs_rms.update(i + (1 + i) * torch.randn(20, obs_dim))
    return agents


def lag_of(script, lag, mode="uniform", seed=0):
    return script.PolicyLag(lag, np.random.default_rng(seed), mode)


# ------------------------------------------------------------------------------------------------------ PolicyLag


def test_snapshots_are_copies(script):
    """The learner goes on, the snapshot stays."""
    (agent,) = policies(script, 1)
    before = copy.deepcopy(agent.state_dict())
    lag = lag_of(script, 1)
    lag.push(agent)
    with torch.no_grad():
        for x in agent.parameters():
            x += 1
    agent.obs_rms.update(torch.randn(20, 3))
    drawn, ages = lag.draw(2)
    assert ages.tolist() == [0, 0]
    for name, x in drawn.items():
        assert torch.equal(x, torch.stack([before[name]] * 2))
        assert not torch.equal(x[0], agent.state_dict()[name])
        assert not x.requires_grad


@pytest.mark.parametrize("mode", ["uniform", "fixed"])
def test_an_age_of_k_is_the_policy_of_k_updates_ago(script, mode):
    agents, lag = policies(script, 7), lag_of(script, 3, mode)
    for agent in agents:
        lag.push(agent)
    drawn, ages = lag.draw(40)
    assert set(ages.tolist()) == ({0, 1, 2, 3} if mode == "uniform" else {3})
    for i, age in enumerate(ages):
        assert all(torch.equal(drawn[name][i], x) for name, x in agents[-1 - age].state_dict().items())


def test_ages_are_uniform(script):
    """Each of 0..4 is expected 2000 times, with a standard deviation of 40."""
    lag = lag_of(script, 4)
    for agent in policies(script, 6, 1, 1):
        lag.push(agent)
    _, ages = lag.draw(10_000)
    counts = np.bincount(ages)
    assert len(counts) == 5
    assert np.abs(counts - 2000).max() < 4 * 40


def test_while_fewer_snapshots_exist_ages_are_fewer(script):
    uniform, fixed = lag_of(script, 2), lag_of(script, 2, "fixed")
    for k, agent in enumerate(policies(script, 5, 1, 1)):
        uniform.push(agent)
        fixed.push(agent)
        assert set(uniform.draw(100)[1].tolist()) == set(range(min(k, 2) + 1))
        assert set(fixed.draw(100)[1].tolist()) == {min(k, 2)}


@pytest.mark.parametrize("mode", ["uniform", "fixed"])
def test_lag_0_is_always_the_newest_policy(script, mode):
    lag = lag_of(script, 0, mode)
    for agent in policies(script, 3):
        lag.push(agent)
        drawn, ages = lag.draw(4)
        assert ages.tolist() == [0] * 4
        assert torch.equal(drawn["actor.0.weight"][2], agent.actor[0].weight)


def test_draws_follow_the_generator(script):
    def ages(seed):
        lag = lag_of(script, 7, seed=seed)
        for agent in policies(script, 8, 1, 1):
            lag.push(agent)
        return [lag.draw(16)[1].tolist() for _ in range(3)]

    assert ages(1) == ages(1)
    assert ages(1) != ages(2)
    assert len({tuple(x) for x in ages(1)}) == 3  # redrawn for each rollout


# ------------------------------------------------------------------------------------------------ acting under lag


@pytest.mark.parametrize("act_dim", [1, 2, 6])
def test_policies_in_one_batch_act_as_each_alone(script, act_dim):
    agents = policies(script, 5, act_dim=act_dim)
    lag = lag_of(script, 4)
    for agent in agents:
        lag.push(agent)
    drawn, ages = lag.draw(12)
    obs = 3 * torch.randn(12, 3)
    together = script.stacked_action_mean(drawn, obs)
    alone = torch.cat([agents[-1 - age].action_mean(obs[i : i + 1]) for i, age in enumerate(ages)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    assert len({round(x, 3) for x in alone[:, 0].tolist()}) > 5


def test_stored_logprobs_are_those_of_the_policy_that_acted(script):
    """Each environment's column is scored by a fresh agent that loads the snapshot drawn for it."""
    pushed, lag = policies(script, 6), lag_of(script, 4)
    for agent in pushed:
        lag.push(agent)
    envs = script.make_envs("toy_envs:Noise-v0", 8)
    drawn, ages = lag.draw(8)
    batch, _ = script.rollout(envs, start(script, envs, seed=3), drawn, torch.randn(20, 8, 2))
    assert len(set(ages.tolist())) > 2
    for i, age in enumerate(ages):
        actor = script.Agent(3, 2)
        actor.load_state_dict(pushed[-1 - age].state_dict())
        normal = torch.distributions.Normal(actor.action_mean(batch["obs"][:, i]), actor.log_std.exp())
        expected = normal.log_prob(batch["actions"][:, i]).sum(-1)
        torch.testing.assert_close(batch["logprobs"][:, i], expected.detach(), rtol=1e-4, atol=1e-4)
        other = policies(script, 1)[0]
        wrong = torch.distributions.Normal(other.action_mean(batch["obs"][:, i]), other.log_std.exp())
        assert (wrong.log_prob(batch["actions"][:, i]).sum(-1) - expected).abs().max() > 0.1


@pytest.mark.parametrize(("lag", "mode"), [(0, "uniform"), (0, "fixed"), (3, "uniform"), (3, "fixed")])
def test_first_ratio_of_an_update_shows_the_lag(script, lag, mode, monkeypatch, tmp_path):
    """pi_theta/mu in the first minibatch is 1 at lag 0, and is not under lag, once there are older policies."""
    calls = spy(monkeypatch, script, "policy_loss")
    args = {"num_envs": 8, "learning_rate": 0.01, "lag": lag, "lag_mode": mode}
    train(script, tmp_path / "run", updates=6, env_id="toy_envs:Noise-v0", **args)
    distances = []
    for (newlogprobs, learner_logprobs, behaviour_logprobs, *_), _ in calls[::4]:  # 2 epochs of 2 minibatches
        distances.append(((newlogprobs - behaviour_logprobs).exp() - 1).abs().mean().item())
        assert ((newlogprobs - learner_logprobs).exp() - 1).abs().mean() < 1e-5
    assert len(distances) == 6
    assert distances[0] < 1e-5
    assert all(x > 1e-3 for x in distances[1:]) if lag else all(x < 1e-5 for x in distances)


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_logged_age_reaches_the_lag_and_never_exceeds_it(script, lag, tmp_path):
    for mode in ("uniform", "fixed"):
        args = {"env_id": "toy_envs:Noise-v0", "num_envs": 8, "lag": lag, "lag_mode": mode, "num_evals": 0}
        train(script, tmp_path / mode, updates=10, **args)
        rows = read_csv(tmp_path / mode / "metrics.csv")
        oldest = [row["lag/age_max"] for row in rows]
        assert all(age <= min(k, lag) for k, age in enumerate(oldest))
        assert max(oldest) == lag
        if mode == "fixed":
            assert oldest == [row["lag/age_mean"] for row in rows] == [min(k, lag) for k in range(10)]


def test_backward_lag_is_logged(script, tmp_path):
    """At lag 0 there is none in any update; under lag there is."""
    for lag in (0, 3):
        args = {"env_id": "toy_envs:Noise-v0", "learning_rate": 0.01, "lag": lag, "lag_mode": "fixed"}
        train(script, tmp_path / str(lag), updates=6, **args)
        rows = read_csv(tmp_path / str(lag) / "metrics.csv")
        tv, ess = ([row[name] for row in rows] for name in ("lag/tv_backward", "lag/ess"))
        if lag:
            assert min(tv[1:]) > 1e-3
            assert max(ess[1:]) < 1 - 1e-5
        else:
            assert max(tv) < 1e-5
            assert min(ess) > 1 - 1e-5


# ------------------------------------------------------------------------------------------------- measured lag


def test_backward_lag_by_hand(script):
    """w = 2, .5: tv = 1/2 (1 + .5)/2 = .375, ess = 2.5^2 / (2 x 4.25) = .735; swapped they would be the same, so one
    more: w = 4, 1, 1: tv = 1/2 (3)/3 = .5, ess = 36 / (3 x 18) = .667"""
    two = script.backward_lag(torch.tensor([2, 0.5]).log(), torch.zeros(2))
    assert two == {"lag/tv_backward": pytest.approx(0.375), "lag/ess": pytest.approx(6.25 / 8.5)}
    three = script.backward_lag(torch.tensor([4.0, 2.0, 0.5]).log(), torch.tensor([1.0, 2.0, 0.5]).log())
    assert three == {"lag/tv_backward": pytest.approx(0.5), "lag/ess": pytest.approx(2 / 3)}


def test_effective_sample_size_bears_ratios_that_overflow(script):
    """Two of four points carry all the weight: ess = 1/2. One of four, and w^2 overflows: 1/4."""
    assert script.backward_lag(torch.tensor([700.0, 700, 0, 0]), torch.zeros(4))["lag/ess"] == pytest.approx(0.5)
    one = script.backward_lag(torch.tensor([400.0, 0, 0, 0]), torch.zeros(4))
    assert one["lag/ess"] == pytest.approx(0.25)
    assert math.isfinite(one["lag/tv_backward"])


# ---------------------------------------------------------------------------------------------- random streams


def streams(script, monkeypatch, folder, **args) -> dict[str, list]:
    """What a training of 4 updates drew: seeds of environments, noise of actions, ages, minibatches in order. In
    `Noise` observations do not depend on actions, so that equal observations are equal minibatches."""
    toy_envs.Noise.forget()
    with monkeypatch.context() as patch:
        rollouts, steps = spy(patch, script, "rollout"), spy(patch, script, "gradient_step")
        args = {"num_envs": 4, "learning_rate": 0.01} | args
        train(
            script,
            folder / "-".join(map(str, [script.__name__, *args.values()])),
            4,
            env_id="toy_envs:Noise-v0",
            **args,
        )
    return {
        "seeds": toy_envs.Noise.seeds[:4],
        "first actions": toy_envs.Noise.actions[: 4 * 8],
        "noise": [arguments[3] for arguments, _ in rollouts],
        "minibatches": [arguments[2]["norm_obs"] for arguments, _ in steps],
        "actions": [batch["actions"] for _, (batch, _) in rollouts],
        "logprobs": [batch["logprobs"] for _, (batch, _) in rollouts],
    }


def equal(a: list, b: list) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_lag_changes_no_other_random_stream(script, monkeypatch, tmp_path):
    synchronous = streams(script, monkeypatch, tmp_path, lag=0)
    for args in ({"lag": 3}, {"lag": 3, "lag_mode": "fixed"}):
        lagged = streams(script, monkeypatch, tmp_path, **args)
        for name in ("seeds", "first actions", "noise", "minibatches"):
            assert equal(synchronous[name], lagged[name]), name
        assert not equal(synchronous["actions"], lagged["actions"])


def test_both_algorithms_share_every_stream_and_the_first_rollout(ppo, vaco, monkeypatch, tmp_path):
    a, b = (streams(script, monkeypatch, tmp_path, lag=2) for script in (ppo, vaco))
    for name in ("seeds", "first actions", "noise", "minibatches"):
        assert equal(a[name], b[name]), name
    assert equal(a["actions"][:1], b["actions"][:1])
    assert equal(a["logprobs"][:1], b["logprobs"][:1])
    assert not equal(a["actions"], b["actions"])  # they learn differently


def test_another_seed_changes_every_stream(script, monkeypatch, tmp_path):
    a, b = (streams(script, monkeypatch, tmp_path, lag=2, seed=seed) for seed in (1, 2))
    assert not set(a["seeds"]) & set(b["seeds"])
    for name in ("noise", "minibatches", "actions", "logprobs"):
        assert not any(np.array_equal(x, y) for x, y in zip(a[name], b[name], strict=True)), name


def test_in_training_every_snapshot_acts_with_its_own_statistics(script, monkeypatch, tmp_path):
    """In the last update of a run under the oldest lag, the policies that act are the untrained one."""
    calls = spy(monkeypatch, script, "rollout")
    args = {"env_id": "toy_envs:Noise-v0", "lag": 5, "lag_mode": "fixed", "num_evals": 0}
    train(script, tmp_path / "run", updates=6, **args)
    acted, learned = calls[-1][0][2], read_model(tmp_path / "run")
    assert (acted["obs_rms.mean"] == 0).all()
    assert (acted["obs_rms.var"] == 1).all()
    assert (learned["obs_rms.mean"] != 0).all()


def test_target_kl_leaves_later_minibatches_as_they_are(script, monkeypatch, tmp_path):
    """An update that ends early must not shift the minibatch stream: pairs of runs share its orders."""
    orders = []
    for target_kl in (None, 1e-9):
        calls = spy(monkeypatch, script, "gradient_step")
        args = {"env_id": "toy_envs:Noise-v0", "num_evals": 0, "target_kl": target_kl, "learning_rate": 0.01}
        train(script, tmp_path / str(target_kl), updates=2, **args)
        monkeypatch.undo()
        first_of_second_update = 4 if target_kl is None else 2
        orders.append(calls[first_of_second_update][0][2]["norm_obs"])
    assert torch.equal(*orders)


def test_vtrace_gets_the_bars(vaco, monkeypatch, tmp_path):
    args = {"env_id": "toy_envs:Noise-v0", "num_evals": 0, "lag": 3}
    calls = spy(monkeypatch, vaco, "vtrace")
    train(vaco, tmp_path / "a", updates=4, **args, rho_bar=1.5, c_bar=0.7, gamma=0.9, gae_lambda=0.8)
    assert [arguments[6:] for arguments, _ in calls] == [[0.9, 0.8, 1.5, 0.7]] * 4
    assert calls[-1][0][5].abs().max() > 0


def test_no_realign_is_the_gae_of_ppo(ppo, vaco, monkeypatch, tmp_path):
    """To the bit, on what a training under lag met."""
    calls = spy(monkeypatch, vaco, "vtrace")
    train(vaco, tmp_path / "run", updates=4, env_id="toy_envs:Noise-v0", num_evals=0, lag=3, realign=False)
    assert len(calls) == 4
    for (*trace, log_rhos, gamma, gae_lambda, _, _), results in calls:
        assert not log_rhos.any()
        expected = ppo.gae(*trace, gamma, gae_lambda)
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
