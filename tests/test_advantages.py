"""`gae` and `vtrace` against sums written out, hand-worked numbers and the faults of other implementations."""

import pytest
import torch
from helpers import spy, train

# T = 3, one environment, gamma .9: rewards 1, values .5, value of the last observation 2
T3 = {
    "rewards": torch.ones(3, 1),
    "values": torch.full((3, 1), 0.5),
    "next_values": torch.tensor([[0.5], [0.5], [2.0]]),
    "terminated": torch.zeros(3, 1),
    "done": torch.zeros(3, 1),
}


def slow_gae(rewards, values, next_values, terminated, done, gamma, gae_lambda):
    """A_t = sum over k >= t of (gamma lambda)^(k-t) delta_k, up to the end of t's episode."""
    advantages = torch.zeros_like(rewards)
    for n in range(rewards.shape[1]):
        for t in range(len(rewards)):
            for k in range(t, len(rewards)):
                target = rewards[k, n] if terminated[k, n] else rewards[k, n] + gamma * next_values[k, n]
                advantages[t, n] += (gamma * gae_lambda) ** (k - t) * (target - values[k, n])
                if done[k, n]:
                    break
    return advantages, advantages + values


def slow_vtrace(rewards, values, next_values, terminated, done, log_rhos, gamma, gae_lambda, rho_bar, c_bar):
    """v_t = V_t + sum over k >= t of (gamma lambda)^(k-t) (c_t ... c_(k-1)) rho_k delta_k, up to the episode's end;
    A_t = r_t + gamma V_(t+1) + gamma lambda (v_(t+1) - V_(t+1)) - V_t, without what lies beyond the episode's end."""
    steps, envs = rewards.shape
    ratios, targets, advantages = log_rhos.exp(), values.clone(), torch.zeros_like(values)
    delta = rewards - values
    for t in range(steps):
        for n in range(envs):
            if not terminated[t, n]:
                delta[t, n] += gamma * next_values[t, n]
    for n in range(envs):
        for t in range(steps):
            for k in range(t, steps):
                product = 1.0
                for j in range(t, k):
                    product *= gamma * gae_lambda * min(c_bar, float(ratios[j, n]))
                targets[t, n] += product * min(rho_bar, float(ratios[k, n])) * delta[k, n]
                if done[k, n]:
                    break
        for t in range(steps):
            advantages[t, n] = delta[t, n]
            if not done[t, n] and t + 1 < steps:
                advantages[t, n] += gamma * gae_lambda * (targets[t + 1, n] - values[t + 1, n])
    return advantages, targets


def random_trajectories(steps=12, envs=5, dtype=torch.float64):
    """Episodes end by termination, truncation or both. Ratios lie on both sides of 1."""
    rewards, values, next_values = torch.randn(3, steps, envs, dtype=dtype)
    terminated, truncated = torch.rand(2, steps, envs) < 0.15
    return rewards, values, next_values, terminated, terminated | truncated, 0.7 * torch.randn(steps, envs, dtype=dtype)


def both(ppo, vaco, rewards, values, next_values, terminated, done, gamma, gae_lambda):
    """Advantages by `gae`, and by `vtrace` with random ratios on both sides of 1."""
    trace = (rewards, values, next_values, terminated, done)
    gae = ppo.gae(*trace, gamma, gae_lambda)[0]
    return {"gae": gae, "vtrace": vaco.vtrace(*trace, torch.randn_like(rewards), gamma, gae_lambda)[0]}


# ------------------------------------------------------------------------------------------------- known numbers


@pytest.mark.parametrize(
    ("gae_lambda", "expected"), [(1.0, [3.668, 3.02, 2.3]), (0.95, [3.4436075, 2.9165, 2.3]), (0.0, [0.95, 0.95, 2.3])]
)
def test_gae_of_three_steps_worked_by_hand(ppo, gae_lambda, expected):
    advantages, returns = ppo.gae(**T3, gamma=0.9, gae_lambda=gae_lambda)
    assert advantages.flatten().tolist() == pytest.approx(expected)
    assert returns.flatten().tolist() == pytest.approx([x + 0.5 for x in expected])


@pytest.mark.parametrize(("gae_lambda", "targets"), [(1.0, [2.809, 2.01, 2.8]), (0.95, [2.69680375, 1.95825, 2.8])])
def test_vtrace_of_three_steps_worked_by_hand(vaco, gae_lambda, targets):
    log_rhos = torch.tensor([[2.0], [0.5], [1.0]]).log()  # above and below 1: swapped log-probabilities would show
    advantages, got = vaco.vtrace(**T3, log_rhos=log_rhos, gamma=0.9, gae_lambda=gae_lambda)
    assert got.flatten().tolist() == pytest.approx(targets)
    after = [targets[1] - 0.5, targets[2] - 0.5, 0]  # v - V of the next step
    delta = [0.95, 0.95, 2.3]
    assert advantages.flatten().tolist() == pytest.approx(
        [d + 0.9 * gae_lambda * x for d, x in zip(delta, after, strict=True)]
    )


# ------------------------------------------------------------------------------------------- sums written out


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.99, 0.95), (0.9, 1.0), (1.0, 0.5), (0.7, 0.0), (0.0, 0.9)])
def test_gae_equals_the_sum_of_its_definition(ppo, gamma, gae_lambda):
    *trace, _ = random_trajectories()
    for got, expected in zip(ppo.gae(*trace, gamma, gae_lambda), slow_gae(*trace, gamma, gae_lambda), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gae_lambda", [1.0, 0.9, 0.0])
@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 1.0), (1.0, 0.5), (0.3, 3.0), (1e9, 1e9)])
def test_vtrace_equals_the_sum_of_its_definition(vaco, rho_bar, c_bar, gae_lambda):
    trace = random_trajectories()
    got = vaco.vtrace(*trace, 0.97, gae_lambda, rho_bar, c_bar)
    for x, expected in zip(got, slow_vtrace(*trace, 0.97, gae_lambda, rho_bar, c_bar), strict=True):
        torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)


def test_vtrace_bars_are_1_by_default(vaco):
    trace = random_trajectories()
    for got, expected in zip(vaco.vtrace(*trace, 0.97, 0.9), slow_vtrace(*trace, 0.97, 0.9, 1, 1), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vtrace_with_equal_policies_is_gae_to_the_bit(ppo, vaco, dtype):
    *trace, _ = random_trajectories(50, 16, dtype)
    zeros = torch.zeros_like(trace[0])
    for got, expected in zip(vaco.vtrace(*trace, zeros, 0.99, 0.95), ppo.gae(*trace, 0.99, 0.95), strict=True):
        assert torch.equal(got, expected)


def test_vtrace_bears_ratios_that_overflow(ppo, vaco):
    *trace, _ = random_trajectories(dtype=torch.float32)
    huge = vaco.vtrace(*trace, torch.full_like(trace[0], 200.0), 0.99, 0.95)  # exp(200) is inf; the bars make it 1
    for got, expected in zip(huge, ppo.gae(*trace, 0.99, 0.95), strict=True):
        assert torch.equal(got, expected)


# ------------------------------------------------------------------------------------------------------ episodes


@pytest.mark.parametrize(("terminated", "truncated", "delta"), [(0, 1, 0.0), (1, 0, -99.0), (1, 1, -99.0), (0, 0, 0.0)])
def test_a_time_limit_bootstraps_and_a_terminal_state_does_not(ppo, vaco, terminated, truncated, delta):
    """Reward 1 for ever at gamma .99 is worth 100. A state both terminal and at the time limit is terminal."""
    ones = torch.ones(1, 1)
    ends = ones.bool() * terminated, ones.bool() * (terminated | truncated)
    for name, advantages in both(ppo, vaco, ones, 100 * ones, 100 * ones, *ends, 0.99, 0.95).items():
        assert advantages.item() == pytest.approx(delta, abs=1e-4), name


def test_a_truncation_inside_the_batch_does_not_see_the_next_episode(ppo, vaco):
    """Two episodes of values 1 and 100, gamma 1, no reward, each cut by its time limit: no surprise."""
    values = torch.tensor([[1.0], [1.0], [100.0], [100.0]])
    truncated = torch.tensor([[0], [1], [0], [1]])
    trace = (torch.zeros(4, 1), values, values, torch.zeros(4, 1), truncated)
    for name, advantages in both(ppo, vaco, *trace, 1.0, 0.95).items():
        assert advantages.abs().max() == 0, name


@pytest.mark.parametrize("by_time_limit", [True, False])
def test_the_next_episode_leaves_earlier_advantages_unchanged(ppo, vaco, by_time_limit):
    rewards, values, next_values, _, _, log_rhos = random_trajectories(10, 3)
    done = torch.zeros(10, 3, dtype=torch.bool)
    done[5] = True
    terminated = torch.zeros_like(done) if by_time_limit else done
    ahead = rewards.clone()
    ahead[6:] = 1e6
    for estimate in (ppo.gae, lambda *trace: vaco.vtrace(*trace[:5], log_rhos, *trace[5:])):
        before, _ = estimate(rewards, values, next_values, terminated, done, 0.99, 0.95)
        after, _ = estimate(ahead, values, next_values, terminated, done, 0.99, 0.95)
        assert torch.equal(before[:6], after[:6])
        assert (after[6:] > 1e5).all()


def test_the_last_step_bootstraps(ppo, vaco):
    """delta = 1 + .9 x 2 - .5 = 2.3, also in a rollout of one step."""
    for name, advantages in both(ppo, vaco, **T3, gamma=0.9, gae_lambda=0.95).items():
        assert advantages[-1].item() == pytest.approx(2.3), name
    one_step = {name: x[-1:] for name, x in T3.items()}
    for name, advantages in both(ppo, vaco, **one_step, gamma=0.9, gae_lambda=0.95).items():
        assert advantages.flatten().tolist() == pytest.approx([2.3]), name


# ------------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64, torch.uint8, torch.int64])
def test_flags_are_bool_or_numbers(ppo, vaco, dtype):
    rewards, values, next_values, terminated, done, log_rhos = random_trajectories(dtype=torch.float32)
    expected = vaco.vtrace(rewards, values, next_values, terminated, done, log_rhos, 0.99, 0.95)
    got = vaco.vtrace(rewards, values, next_values, terminated.to(dtype), done.to(dtype), log_rhos, 0.99, 0.95)
    assert all(torch.equal(x, y) and x.dtype == torch.float32 for x, y in zip(got, expected, strict=True))
    expected = ppo.gae(rewards, values, next_values, terminated, done, 0.99, 0.95)
    got = ppo.gae(rewards, values, next_values, terminated.to(dtype), done.to(dtype), 0.99, 0.95)
    assert all(torch.equal(x, y) and x.dtype == torch.float32 for x, y in zip(got, expected, strict=True))


def test_float64_keeps_its_precision(ppo, vaco):
    """1 + 1e-12 is 1 in float32."""
    one = torch.ones(1, 1, dtype=torch.float64)
    for name, advantages in both(ppo, vaco, one * (1 + 1e-12), one, 0 * one, 0 * one, 0 * one, 0.9, 0.95).items():
        assert advantages.dtype == torch.float64, name
        assert advantages.item() == pytest.approx(1e-12, rel=1e-3), name


def test_no_gradient_passes_and_no_input_changes(ppo, vaco):
    *trace, log_rhos = random_trajectories(dtype=torch.float32)
    inputs = [*trace, log_rhos]
    for x in (*inputs[:3], log_rhos):
        x.requires_grad_()
    copies = [x.detach().clone() for x in inputs]
    results = [*ppo.gae(*trace, 0.99, 0.95), *vaco.vtrace(*trace, log_rhos, 0.99, 0.95)]
    assert not any(x.requires_grad for x in results)
    assert all(torch.equal(x, before) for x, before in zip(inputs, copies, strict=True))


@pytest.mark.parametrize("wrong", range(6))
def test_shapes_that_would_broadcast_are_refused(ppo, vaco, wrong):
    trace = list(random_trajectories())
    trace[wrong] = trace[wrong][:, :1]
    with pytest.raises(AssertionError):
        vaco.vtrace(*trace, 0.99, 0.95)
    if wrong < 5:
        with pytest.raises(AssertionError):
            ppo.gae(*trace[:5], 0.99, 0.95)


# ------------------------------------------------------------------------------------------- inside a training


def std_of_returns(rewards, done, gamma):
    """Standard deviation of the discounted returns so far, one for every step, each restarting with its episode."""
    discounted = []
    for n in range(rewards.shape[1]):
        start = 0
        for t in range(len(rewards)):
            discounted.append(sum(gamma ** (t - k) * float(rewards[k, n]) for k in range(start, t + 1)))
            start = t + 1 if done[t, n] else start
    return (torch.tensor(discounted).var(correction=0) + 1e-8).sqrt()


def test_training_estimates_advantages_from_the_learner_and_the_true_next_observations(script, monkeypatch, tmp_path):
    """All that comes between a rollout and its update, in three updates under lag: values of the learner, true last
    observations, scaled rewards whose statistics are those of the updates before (the first rollout: its own)."""
    calls = spy(monkeypatch, script, "update")
    args = {"num_envs": 3, "num_steps": 16, "lag": 2, "learning_rate": 0.01, "gamma": 0.9}
    train(script, tmp_path / "run", updates=3, env_id="toy_envs:Noise-v0", **args)

    rewards_before, done_before = torch.empty(0, 3), torch.empty(0, 3, dtype=torch.bool)
    for (agent, _, flat, *_), _ in calls:
        batch = {name: x.unflatten(0, (16, 3)) for name, x in flat.items()}
        seen = torch.cat([rewards_before, batch["rewards"]]), torch.cat([done_before, batch["done"]])
        known = seen if len(rewards_before) == 0 else (rewards_before, done_before)
        rewards = (batch["rewards"] / std_of_returns(*known, 0.9)).clamp(-10, 10)
        rewards_before, done_before = seen

        with torch.no_grad():
            values, next_values = agent.value(batch["obs"]), agent.value(batch["next_obs"])
            policy = torch.distributions.Normal(agent.action_mean(batch["obs"]), agent.log_std.exp())
            log_rhos = policy.log_prob(batch["actions"]).sum(-1) - batch["logprobs"]
        trace = (rewards, values, next_values, batch["terminated"], batch["done"])
        if script.__name__ == "vaco_continuous":
            expected = slow_vtrace(*trace, log_rhos, 0.9, 0.95, 1, 1)
        else:
            expected = slow_gae(*trace, 0.9, 0.95)
        torch.testing.assert_close(batch["advantages"], expected[0], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(batch["returns"], expected[1], rtol=1e-3, atol=1e-4)
    assert log_rhos.abs().max() > 0.01  # the policies did differ
    assert batch["done"].any()
