"""Log-probabilities, both policy losses, the filter, and a gradient step, against numbers worked by hand."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import load, read_csv, read_model, same_tensors, spy, train


def log(*ratios: float) -> torch.Tensor:
    return torch.tensor(ratios).log()


def ppo_args(clip_coef=0.2, recompute_logprobs=False):
    return SimpleNamespace(clip_coef=clip_coef, recompute_logprobs=recompute_logprobs)


def vaco_args(delta=0.2, tv_filter=True):
    return SimpleNamespace(delta=delta, tv_filter=tv_filter)


# ---------------------------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("act_dim", [1, 2, 6])
def test_logprob_is_that_of_the_whole_action(script, act_dim):
    actions, mean = torch.randn(2, 7, 3, act_dim, dtype=torch.float64)
    log_std = torch.randn(act_dim, dtype=torch.float64)
    normal = torch.distributions.Normal(mean, log_std.exp())
    expected = torch.distributions.Independent(normal, 1).log_prob(actions)
    torch.testing.assert_close(script.gaussian_logprob(actions, mean, log_std), expected)


def test_logprob_of_two_standard_normals_at_0(script):
    zeros = torch.zeros(1, 2)
    assert script.gaussian_logprob(zeros, zeros, zeros[0]).tolist() == pytest.approx([-1.8378771])


# ---------------------------------------------------------------------------------------------------- PPO's loss


def test_clipped_loss_by_hand(ppo):
    """Clip .2. Ratios to mu 2, .5, 2, .5, 1.1 with advantages 1, 1, -1, -1, 3:
    min(2, 1.2) + min(.5, .8) + min(-2, -1.2) + min(-.5, -.8) + 3.3 = 1.2 + .5 - 2 - .8 + 3.3 = 2.2"""
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 3.0])
    new = log(2, 0.5, 2, 0.5, 1.1).requires_grad_()
    loss, losses = ppo.policy_loss(new, log(1, 1, 1, 1, 1.1), log(1, 1, 1, 1, 1), advantages, ppo_args())
    assert loss.item() == pytest.approx(-2.2 / 5)
    loss.backward()  # of -ratio A / 5 where the clip does not hold it, else 0
    assert new.grad.tolist() == pytest.approx([0, -0.5 / 5, 2 / 5, 0, -3.3 / 5])
    assert losses["losses/clipfrac"].item() == pytest.approx(4 / 5)
    assert losses["lag/tv_forward_mean"].item() == pytest.approx(0.5 * (1 + 0.5 + 1 + 0.5 + 0) / 5)  # to pi_T


def test_recomputed_logprobs_centre_the_clip_on_the_learner(ppo):
    """Ratio to mu 4, to pi_T 2, A = 1: clipped to 1.2 either way. With A = -1 not clipped: -4 or -2."""
    new, learner, mu, one = log(4), log(2), log(1), torch.ones(1)
    for recompute, ratio in ((False, 4), (True, 2)):
        args = ppo_args(recompute_logprobs=recompute)
        assert ppo.policy_loss(new, learner, mu, one, args)[0].item() == pytest.approx(-1.2)
        assert ppo.policy_loss(new, learner, mu, -one, args)[0].item() == pytest.approx(ratio)


def test_width_of_the_clip(ppo):
    loss, losses = ppo.policy_loss(log(2), log(1), log(1), torch.ones(1), ppo_args(clip_coef=0.5))
    assert (loss.item(), losses["losses/clipfrac"].item()) == (-1.5, 1)


# --------------------------------------------------------------------------------------------------- VACO's loss


def test_filtered_loss_by_hand(vaco):
    """Ratios to pi_T 2, .5, 2, .5: tv = 1/2 (1 + .5 + 1 + .5)/4 = .375 > .1. With A = 1, 1, -1, -1 the first and the
    last lead away from pi_T and are dropped. Ratios to mu 4, 1, 1, .25: loss -(1 x 1 + 1 x -1)/4 = 0; the gradient of
    each kept point is -ratio A / 4, the mean is over all four."""
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    new = log(2, 0.5, 2, 0.5).requires_grad_()
    loss, losses = vaco.policy_loss(new, log(1, 1, 1, 1), log(0.5, 0.5, 2, 2), advantages, vaco_args())
    assert loss.item() == pytest.approx(0)
    loss.backward()
    assert new.grad.tolist() == pytest.approx([0, -1 / 4, 1 / 4, 0])
    assert losses["lag/tv_forward_mean"].item() == pytest.approx(0.375)
    assert (losses["lag/filtered_fraction"].item(), losses["lag/filter_triggered"].item()) == (0.5, 1)


def test_without_the_filter_every_point_counts(vaco):
    new = log(2, 0.5).requires_grad_()
    advantages = torch.tensor([1.0, -1.0])
    loss, losses = vaco.policy_loss(new, log(1, 1), log(0.5, 0.5), advantages, vaco_args(tv_filter=False))
    assert loss.item() == pytest.approx(-(4 - 1) / 2)
    assert losses["lag/tv_forward_mean"].item() == pytest.approx(0.375)
    assert (losses["lag/filtered_fraction"].item(), losses["lag/filter_triggered"].item()) == (0, 0)


# ---------------------------------------------------------------------------------------------------- the filter


def test_filter_measures_the_distance_from_the_learner_not_from_the_behaviour_policy(vaco):
    """pi_theta is .5 and 2 times pi_T but equal to mu; swapped, nothing would be dropped."""
    new, learner, advantages = log(1, 1, 1), log(2, 0.5, 0.5), torch.tensor([-1.0, 1.0, -1.0])
    keep, tv = vaco.tv_filter(new, learner, log(1, 1, 1), advantages, 0.2)
    assert keep.tolist() == [False, False, True]
    assert tv.item() == pytest.approx(0.5 * (0.5 + 1 + 1) / 3)
    keep, tv = vaco.tv_filter(new, log(1, 1, 1), learner, advantages, 0.2)
    assert keep.tolist() == [True, True, True]
    assert tv.item() == 0


def test_filter_acts_only_above_half_of_delta(vaco):
    """tv of the ratios 1.2 and 1 is 1/2 (.2 + 0)/2 = .05"""
    points = log(1.2, 1), log(1, 1), log(1, 1), torch.ones(2)
    for delta, first_kept in ((0.0999, False), (0.1001, True), (0.2, True)):
        keep, tv = vaco.tv_filter(*points, delta)
        assert tv.item() == pytest.approx(0.05)
        assert keep.tolist() == [first_kept, True]


def test_filter_drops_outward_points_and_keeps_all_others(vaco):
    ratios, advantages = torch.randn(500).exp(), torch.randn(500)
    keep, _ = vaco.tv_filter(ratios.log(), torch.zeros(500), torch.zeros(500), advantages, 0.2)
    assert keep.dtype == torch.bool
    for kept, ratio, advantage in zip(keep.tolist(), ratios.tolist(), advantages.tolist(), strict=True):
        outward = advantage > 0 if ratio > 1 else advantage < 0  # a step along the gradient takes the ratio from 1
        assert kept != outward


def test_filter_passes_no_gradient(vaco):
    new, learner, mu, advantages = torch.randn(4, 9).requires_grad_()
    keep, tv = vaco.tv_filter(new, learner, mu, advantages, 0.2)
    assert not keep.requires_grad
    assert not tv.requires_grad


def test_delta_of_the_paper_is_accepted(vaco):
    assert vaco.Args(delta=0.2).delta == 0.2
    for delta in (0, -0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="--delta"):
            vaco.Args(delta=delta)


# ------------------------------------------------------------------------------------------------- both losses


@pytest.mark.parametrize(
    ("name", "advantage"),
    [
        ("ppo_continuous", 1.0),
        ("ppo_continuous", 0.0),  # with A < 0 PPO's loss really is infinite
        ("vaco_continuous", 1.0),
        ("vaco_continuous", 0.0),
        ("vaco_continuous", -1.0),
    ],
)
def test_an_infinite_ratio_that_is_dropped_leaves_loss_and_gradient_finite(name, advantage):
    """exp(-2 - -91) overflows; 0 times that would be NaN."""
    args = ppo_args() if name == "ppo_continuous" else vaco_args()
    new = torch.tensor([-2.0, -1.0], requires_grad=True)
    mu, advantages = torch.tensor([-91.0, -1.0]), torch.tensor([advantage, 1.0])
    loss, _ = load(name).policy_loss(new, torch.tensor([-1.0, -1.0]), mu, advantages, args)
    loss.backward()
    assert loss.isfinite()
    assert new.grad.tolist() == [0, -0.5]


@pytest.mark.parametrize("name", ["ppo_continuous", "vaco_continuous"])
def test_first_gradient_of_a_bandit_carries_the_ratio_once(name):
    """One step, pi_T/mu = .5, A = 1: the gradient of the loss is -.5 grad log pi. Not 1 (ratio ignored) and not .25
    (in the advantage and again in the loss)."""
    script = load(name)
    one, zero, gamma = torch.ones(1, 1), torch.zeros(1, 1), 0.99
    log_rhos = log(0.5).view(1, 1)
    if name == "vaco_continuous":
        advantages, _ = script.vtrace(one, zero, zero, one, one, log_rhos, gamma, 0.95)
    else:
        advantages, _ = script.gae(one, zero, zero, one, one, gamma, 0.95)
    new = log(0.5).requires_grad_()
    args = ppo_args() if name == "ppo_continuous" else vaco_args()
    script.policy_loss(new, log(0.5), log(1), advantages.flatten(), args)[0].backward()
    assert new.grad.tolist() == pytest.approx([-0.5])


@pytest.mark.parametrize("name", ["ppo_continuous", "vaco_continuous"])
def test_loss_moves_with_the_stored_logprobs_and_sends_them_no_gradient(name):
    args = ppo_args() if name == "ppo_continuous" else vaco_args()
    new, learner = log(1.1, 0.9), log(1, 1)
    losses = []
    for mu in (log(1, 1), log(1.1, 0.95)):
        losses.append(load(name).policy_loss(new, learner, mu, torch.tensor([1.0, -2.0]), args)[0].item())
    assert losses[0] == pytest.approx(-(1.1 - 1.8) / 2)
    assert losses[1] == pytest.approx(-(1 - 2 * 0.9 / 0.95) / 2)


# ------------------------------------------------------------------------------------------------ a gradient step


def minibatch(script, agent, size=64):
    """Points of pi_T = `agent`, acted by a policy that was a little different."""
    obs, actions = torch.randn(size, 3), torch.randn(size, 2)
    learner = torch.distributions.Normal(agent.action_mean(obs), agent.log_std.exp()).log_prob(actions).sum(-1).detach()
    logprobs = learner + 0.3 * torch.randn(size)
    mb = {"norm_obs": obs, "actions": actions, "learner_logprobs": learner, "logprobs": logprobs}
    return mb | {"advantages": 5 + 3 * torch.randn(size), "returns": torch.randn(size)}


def step(script, agent, mb, **args):
    """One step of plain gradient descent at rate 1, so that the change of the parameters is the gradient: a tenth of it
    is the first moment after one step."""
    args = script.Args(**{"max_grad_norm": 1e9} | args)
    opt_state, losses = script.gradient_step(agent, script.init_adam(agent), mb, args)
    torch.nn.utils.vector_to_parameters(opt_state["params"] - opt_state["exp_avg"] / 0.1, agent.parameters())
    return losses


def init_at(script, agent, lr):
    return script.init_adam(agent) | {"lr": torch.tensor(lr)}


def test_advantages_are_normalised_over_the_whole_minibatch(script, monkeypatch):
    """Dropped points too: the filter comes after."""
    agent = script.Agent(3, 2)
    mb = minibatch(script, agent)
    mb["learner_logprobs"] += torch.randn(64)  # as late in an update: tv is large
    calls = spy(monkeypatch, script, "policy_loss")
    step(script, agent, mb)
    step(script, agent, mb, norm_adv=False)
    (first, (_, losses)), (second, _) = calls
    expected = (mb["advantages"] - mb["advantages"].mean()) / mb["advantages"].std()
    torch.testing.assert_close(first[3], expected)
    assert torch.equal(second[3], mb["advantages"])
    if script.__name__ == "vaco_continuous":
        assert 0.2 < losses["lag/filtered_fraction"] < 0.8


def test_value_loss_is_half_the_mean_squared_error(script):
    agent = script.Agent(3, 2)
    mb = minibatch(script, agent)
    errors = (agent(mb["norm_obs"])[1] - mb["returns"]).tolist()
    assert step(script, agent, mb)["losses/value_loss"].item() == pytest.approx(sum(e * e for e in errors) / 2 / 64)


@pytest.mark.parametrize("ent_coef", [0.0, 0.3])
def test_entropy_bonus_widens_the_policy(script, ent_coef):
    """Without advantages only the bonus moves the policy; the entropy of a Gaussian grows by 1 per unit of log std."""
    agent = script.Agent(3, 2)
    agent.log_std.data = torch.tensor([0.5, -1.0])
    mb = minibatch(script, agent)
    mb["advantages"] = torch.zeros(64)
    before = {name: x.clone() for name, x in agent.state_dict().items()}
    losses = step(script, agent, mb, ent_coef=ent_coef, norm_adv=False)
    entropy = torch.distributions.Normal(torch.zeros(2), torch.tensor([0.5, -1.0]).exp()).entropy().sum()
    torch.testing.assert_close(losses["losses/entropy"], entropy)
    assert agent.log_std.tolist() == pytest.approx([0.5 + ent_coef, -1 + ent_coef])
    assert torch.equal(agent.actor[4].weight, before["actor.4.weight"])


def test_weight_of_the_value_loss(script):
    """The critic has parameters of its own, so its gradient is that of vf_coef times the value loss."""
    changes = []
    for vf_coef in (0.5, 2.0):
        torch.manual_seed(1)
        agent = script.Agent(3, 2)
        mb, before = minibatch(script, agent), agent.critic[4].weight.detach().clone()
        step(script, agent, mb, vf_coef=vf_coef)
        changes.append((agent.critic[4].weight - before).detach())
    torch.testing.assert_close(changes[1], 4 * changes[0])


def test_gradient_is_clipped_by_its_norm_and_logged_before(script):
    agent = script.Agent(3, 2)
    mb = minibatch(script, agent)
    before = torch.nn.utils.parameters_to_vector(agent.parameters()).detach()
    losses = step(script, agent, mb, max_grad_norm=0.01)
    change = torch.nn.utils.parameters_to_vector(agent.parameters()).detach() - before
    assert losses["losses/grad_norm"] > 0.05
    assert change.norm().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("max_grad_norm", [0.05, 1e9])
def test_steps_are_those_of_torch(script, max_grad_norm):
    """Gradient by autograd on the agent itself, clip_grad_norm_ and torch.optim.Adam, on three minibatches."""
    agent, args = script.Agent(3, 2), script.Args(ent_coef=0.1, max_grad_norm=max_grad_norm)
    opt_state, reference = init_at(script, agent, 0.01), copy.deepcopy(agent)
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.01, eps=1e-5)
    before = torch.nn.utils.parameters_to_vector(agent.parameters()).detach().clone()
    for _ in range(3):
        mb = minibatch(script, agent)
        opt_state, losses = script.gradient_step(agent, opt_state, mb, args)

        mean, newvalues = reference(mb["norm_obs"])
        normal = torch.distributions.Normal(mean, reference.log_std.exp())
        advantages = (mb["advantages"] - mb["advantages"].mean()) / (mb["advantages"].std() + 1e-8)
        new = normal.log_prob(mb["actions"]).sum(-1)
        loss, _ = script.policy_loss(new, mb["learner_logprobs"], mb["logprobs"], advantages, args)
        loss = loss - 0.1 * normal.entropy().sum(-1).mean()
        loss = loss + 0.5 * 0.5 * ((newvalues - mb["returns"]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_grad_norm)
        optimizer.step()
        torch.testing.assert_close(losses["losses/grad_norm"], norm)
        expected = torch.nn.utils.parameters_to_vector(reference.parameters())
        torch.testing.assert_close(opt_state["params"], expected, rtol=1e-5, atol=1e-5)  # of steps of 0.01
    # pure: the agent is as it was, until `update` gives it the new parameters
    assert torch.equal(torch.nn.utils.parameters_to_vector(agent.parameters()), before)


# ------------------------------------------------------------------------------------------------------ an update


def batch_and_args(script, agent, **args):
    args = script.Args(**{"num_envs": 4, "num_steps": 16, "num_minibatches": 4, "update_epochs": 5} | args)
    return minibatch(script, agent, args.batch_size), args


def test_every_epoch_visits_every_point_once_in_a_new_order(script, monkeypatch):
    agent = script.Agent(3, 2)
    batch, args = batch_and_args(script, agent)
    copies = {name: x.clone() for name, x in batch.items()}
    calls = spy(monkeypatch, script, "gradient_step")
    _, losses = script.update(agent, init_at(script, agent, 1e-3), batch, args, np.random.default_rng(0))
    assert {len(x) for x in losses.values()} == {5 * 4}
    epochs = [torch.cat([arguments[2]["returns"] for arguments, _ in calls[i : i + 4]]) for i in range(0, 20, 4)]
    for order in epochs:
        assert torch.equal(order.sort()[0], batch["returns"].sort()[0])
    assert len({tuple(order.tolist()) for order in epochs}) == 5
    for arguments, _ in calls:  # a point keeps its own observation, advantage and log-probabilities
        mb = arguments[2]
        where = [(batch["returns"] == x).nonzero().item() for x in mb["returns"]]
        assert all(torch.equal(x, batch[name][where]) for name, x in mb.items())
        assert mb.keys() == batch.keys()
    assert same_tensors(copies, batch)  # weights and advantages are the same in every epoch


def test_filter_looks_at_the_current_policy_in_every_minibatch(vaco):
    """At first pi_theta = pi_T, so nothing is dropped; the distance then grows, until the filter acts."""
    agent = vaco.Agent(3, 2)
    batch, args = batch_and_args(vaco, agent)
    _, losses = vaco.update(agent, init_at(vaco, agent, 0.01), batch, args, np.random.default_rng(0))
    tv = losses["lag/tv_forward_mean"]
    triggered, filtered = losses["lag/filter_triggered"], losses["lag/filtered_fraction"]
    assert tv[0] < 1e-6
    assert len(set(tv.tolist())) == len(tv)
    assert torch.equal(triggered.bool(), tv > 0.1)
    assert torch.equal(filtered > 0, tv > 0.1)
    assert not triggered[0]
    assert triggered[-1]


def test_target_kl_ends_the_update_after_the_epoch_that_exceeds_it(script):
    """The mean over the whole epoch counts: its first minibatch, where the policy is still pi_T, has none."""
    steps = {}
    for target_kl in (None, 1e-9, 1e9):
        torch.manual_seed(1)
        agent = script.Agent(3, 2)
        batch, args = batch_and_args(script, agent, target_kl=target_kl)
        _, losses = script.update(agent, init_at(script, agent, 0.01), batch, args, np.random.default_rng(0))
        steps[target_kl] = len(losses["losses/approx_kl_mean"])
        assert losses["losses/approx_kl_mean"][0].abs() < 1e-6
        assert losses["losses/approx_kl_mean"].max() > 1e-4
    assert steps == {None: 20, 1e-9: 4, 1e9: 20}


def test_target_kl_compares_the_mean_of_the_epoch(script):
    """A threshold between the last minibatch's KL and the mean of the first epoch does not stop there."""

    def run(target_kl):
        torch.manual_seed(1)
        agent = script.Agent(3, 2)
        batch, args = batch_and_args(script, agent, target_kl=target_kl)
        _, losses = script.update(agent, init_at(script, agent, 0.01), batch, args, np.random.default_rng(0))
        return losses["losses/approx_kl_mean"]

    kl = run(None).view(5, 4)
    assert kl[0, -1] > 1.2 * kl[0].mean()
    assert len(run(float(1.1 * kl[0].mean()))) > 4
    assert len(run(float(0.9 * kl[0].mean()))) == 4


def test_mean_and_maximum_are_logged_over_the_whole_update(script, monkeypatch, tmp_path):
    calls = spy(monkeypatch, script, "update")
    train(script, tmp_path / "run", updates=3, env_id="toy_envs:Noise-v0", learning_rate=0.01)
    for (_, (_, losses)), row in zip(calls, read_csv(tmp_path / "run" / "metrics.csv"), strict=True):
        assert row["losses/approx_kl_mean"] == pytest.approx(losses["losses/approx_kl_mean"].mean().item())
        assert row["losses/approx_kl_max"] == pytest.approx(losses["losses/approx_kl_mean"].max().item())
        assert row["lag/tv_forward_mean"] == pytest.approx(losses["lag/tv_forward_mean"].mean().item())
        assert row["lag/tv_forward_max"] == pytest.approx(losses["lag/tv_forward_mean"].max().item())
        assert row["lag/tv_forward_last"] == pytest.approx(losses["lag/tv_forward_mean"][-1].item())


# ---------------------------------------------------------------------------------- environments of known values


def learn(script, run_dir, env_id, updates=10, **args):
    """So many updates of 256 steps of a toy environment, under lag. Returns the agent saved."""
    args = {"num_envs": 8, "num_steps": 32, "num_minibatches": 4, "update_epochs": 10, "learning_rate": 5e-3} | args
    train(script, run_dir, updates, env_id=f"toy_envs:{env_id}-v0", lag=2, num_evals=0, **args)
    agent = script.Agent(1, 1)
    agent.load_state_dict(read_model(run_dir))
    return agent


def test_value_of_a_constant_reward(script, tmp_path):
    """One step, reward 1. Its return never varies, so the scaled reward is at its bound, 10."""
    agent = learn(script, tmp_path / "run", "Constant")
    assert agent.value(torch.tensor([[0.0]])).item() == pytest.approx(10, rel=0.01)


def test_value_depends_on_the_observation(script, tmp_path):
    """One step, paid what is observed, -1 or 1; the standard deviation of that is 1."""
    agent = learn(script, tmp_path / "run", "Sign")
    assert agent.value(torch.tensor([[-1.0], [1.0]])).tolist() == pytest.approx([-1, 1], abs=0.05)


def test_value_is_discounted(script, tmp_path):
    """Two steps, the second pays 1. Discounted returns are 0 and 1, their standard deviation 1/2, so that the scaled
    reward is 2: worth 2 in the second state and gamma x 2 in the first."""
    agent = learn(script, tmp_path / "run", "Delayed", gamma=0.5)
    assert agent.value(torch.tensor([[0.0], [1.0]])).tolist() == pytest.approx([1, 2], abs=0.05)


def test_policy_finds_the_best_action(script, tmp_path):
    """Paid by the squared distance from 1/2."""
    agent = learn(script, tmp_path / "run", "Target", updates=15)
    assert agent.action_mean(torch.tensor([[0.0]])).item() == pytest.approx(0.5, abs=0.1)
    assert agent.log_std.item() < -1
