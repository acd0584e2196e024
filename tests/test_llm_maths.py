"""The losses, masks and rewards of the two LLM scripts against hand-worked numbers and slow independent references."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo_llm
import vaco_llm

PAIR = pytest.mark.parametrize("script", [grpo_llm, vaco_llm], ids=["grpo", "vaco"])


def random_batch(seed, B=5, L=7, spread=0.3):
    """Log-probabilities under pi_theta, pi_T and mu with ratios on both sides of 1, ragged mask, advantages."""
    g = torch.Generator().manual_seed(seed)
    behaviour = -torch.rand(B, L, generator=g) * 2 - 0.1
    learner = behaviour + spread * torch.randn(B, L, generator=g)
    new = (learner + spread * torch.randn(B, L, generator=g)).requires_grad_()
    lengths = torch.randint(1, L + 1, (B, 1), generator=g)
    return new, learner, behaviour, torch.randn(B, generator=g), torch.arange(L) < lengths


def grpo(new, learner, behaviour, advantages, mask, **more):
    return grpo_llm.grpo_loss(new, behaviour, advantages, mask, 0.2, 0.2, **more)


def vaco(new, learner, behaviour, advantages, mask, **more):
    return vaco_llm.vaco_loss(new, learner, behaviour, advantages, mask, 0.05, 2.0, **more)


LOSSES = pytest.mark.parametrize("loss", [grpo, vaco])


# ------------------------------------------------------------------------------------------------------ advantages


@PAIR
def test_advantages_are_normalised_within_the_group(script):
    advantages = script.group_advantages(torch.tensor([[1.0, 0.0], [10.0, 9.0]]))
    expected = math.sqrt(0.5)
    torch.testing.assert_close(advantages, torch.tensor([[expected, -expected]] * 2), atol=2e-4, rtol=0)


@PAIR
def test_advantages_without_the_std(script):
    advantages = script.group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 0.0, 0.0, 0.0]]), normalize=False)
    torch.testing.assert_close(advantages, torch.tensor([[0.5, -0.5, -0.5, 0.5], [2.25, -0.75, -0.75, -0.75]]))


@PAIR
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("reward", [0.0, 0.3, 1.0, 1 / 3])
def test_equal_rewards_give_exactly_zero(script, reward, normalize):
    advantages = script.group_advantages(torch.full((3, 8), reward), normalize)
    assert (advantages == 0).all()


@PAIR
def test_a_group_of_one_has_no_baseline(script):
    with pytest.raises(ValueError, match="2 or more"):
        script.group_advantages(torch.ones(4, 1))


@given(st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=9))
@settings(max_examples=50, deadline=None)
def test_advantages_agree_with_numpy(rewards):
    rewards = np.array([rewards], dtype=np.float32)
    got = grpo_llm.group_advantages(torch.as_tensor(rewards)).numpy()
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(got, 0 * rewards if np.ptp(rewards) == 0 else expected, atol=2e-3)


# ----------------------------------------------------------------------------------------------------------- masks


@PAIR
@pytest.mark.parametrize("eos_ids", [[9], [9, 8], torch.tensor([9]), 9], ids=str)
def test_completion_mask(script, eos_ids):
    E = 9
    tokens = torch.tensor([[5, 6, E, E, E], [E, 5, 5, 5, 5], [5, 6, 7, 5, 6], [5, 6, 7, 5, E]])
    mask, truncated = script.completion_mask(tokens, eos_ids)
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert truncated.tolist() == [False, False, True, False]


@PAIR
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_token_logprobs_are_log_softmax(script, temperature):
    logits = torch.randn(3, 4, 11, generator=torch.Generator().manual_seed(0)) * 5
    tokens = torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(1))
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got = script.token_logprobs(ours, tokens, temperature)
    expected = (theirs / temperature).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(got, expected)
    weights = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@PAIR
def test_token_logprobs_of_half_precision_logits_are_fp32(script):
    logits = (torch.randn(2, 3, 50) * 8).bfloat16()
    got = script.token_logprobs(logits, torch.zeros(2, 3, dtype=torch.long), 1.0)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, logits.float().log_softmax(-1)[..., 0])


# ---------------------------------------------------------------------------------------------------------- reward


@PAIR
@pytest.mark.parametrize(
    ("completion", "reference", "reward"),
    [
        ("#### 42" + "x 7 " * 125, "42", 1.0),
        ("#### 42" + "!" * 500, "42", 1.0),
        ("answer is 43", "42", 0.0),
        ("1,000", "1000", 1.0),
        ("1000", "1,000", 1.0),
        ("#### $1,234,567.50 in all", "1234567.5", 1.0),
        ("", "42", 0.0),
        ("no number", "42", 0.0),
        ("12;9;17;15;24", "24", 1.0),
        ("12;9;17;15;24", "15", 0.0),
        ("24;-3", "-3", 1.0),
        ("24;-3", "3", 0.0),
        ("8-3", "3", 1.0),
        (r"so \boxed{42}, not 7", "42", 1.0),
        (r"so \boxed{-1,042}. 7", "-1042", 1.0),
        ("it is 42.", "42", 1.0),
        ("it is 42.0", "42", 1.0),
        ("3*4=12\n12+1=13\n#### 13", "13", 1.0),
        ("3*4=12\n12+1=13\n#### 12", "13", 0.0),
        ("99", "a worked reference: 3*4=12\n#### 99", 1.0),
    ],
)
def test_answer_reward(script, completion, reference, reward):
    assert script.answer_reward(completion, reference) == reward


@PAIR
@pytest.mark.parametrize("reference", [None, "", "none", float("nan")])
def test_a_missing_reference_is_an_error(script, reference):
    with pytest.raises(ValueError, match="holds no number"):
        script.answer_reward("42", reference)


# ---------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize(
    ("loss_type", "expected"), [("sequence-mean", 0.5), ("token-mean", -0.25), ("constant", -0.0625)]
)
def test_three_averages(loss_type, expected):
    zeros, mask = torch.zeros(2, 3), torch.tensor([[True, False, False], [True, True, True]])
    advantages = torch.tensor([-2.0, 1.0])  # at ratio 1 the token losses are [2] and [-1, -1, -1]
    loss, _ = grpo_llm.grpo_loss(zeros, zeros, advantages, mask, 0.2, 0.2, loss_type=loss_type, max_length=8)
    assert loss.item() == pytest.approx(expected)


def test_a_constant_needs_its_length():
    new, _, behaviour, advantages, mask = random_batch(0)
    for more in ({"loss_type": "constant"}, {"loss_type": "sum"}):
        with pytest.raises(ValueError, match="loss_type"):
            grpo_llm.grpo_loss(new, behaviour, advantages, mask, 0.2, 0.2, **more)


@pytest.mark.parametrize("seed", range(5))
def test_grpo_agrees_with_a_loop(seed):
    new, _, behaviour, advantages, mask = random_batch(seed)
    total, clipped = 0.0, 0
    for b in range(5):
        for t in range(7):
            if mask[b, t]:
                ratio, A = math.exp(float(new.detach()[b, t] - behaviour[b, t])), float(advantages[b])
                total -= min(ratio * A, min(max(ratio, 0.8), 1.3) * A)
                clipped += not 0.8 <= ratio <= 1.3
    loss, metrics = grpo_llm.grpo_loss(new, behaviour, advantages, mask, 0.2, 0.3)
    assert loss.item() == pytest.approx(total / int(mask.sum()), rel=1e-5)
    assert metrics["clipfrac"].item() == pytest.approx(clipped / int(mask.sum()))


@pytest.mark.parametrize("center", ["behaviour", "learner"])
@pytest.mark.parametrize("realign", [True, False])
@pytest.mark.parametrize("use_filter", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_vaco_agrees_with_a_loop(seed, use_filter, realign, center):
    delta, rho_bar = 0.3, 1.2
    new, learner, behaviour, advantages, mask = random_batch(seed)
    total, dropped, triggered = 0.0, 0, 0
    for b in range(5):
        old = behaviour[b] if center == "behaviour" else learner[b]
        valid = [t for t in range(7) if mask[b, t]]
        tv = sum(0.5 * abs(math.exp(new[b, t] - old[t]) - 1) for t in valid) / len(valid)
        triggered += use_filter and tv > delta / 2
        for t in valid:
            A = float(advantages[b])
            if use_filter and tv > delta / 2 and A * float(new[b, t] - old[t]) > 0:
                dropped += 1
                continue
            weight = min(math.exp(learner[b, t] - behaviour[b, t]), rho_bar) if realign else 1.0
            total -= weight * math.exp(new[b, t] - learner[b, t]) * A
    switches = {"realign": realign, "tv_filter": use_filter, "center": center}
    loss, metrics = vaco_llm.vaco_loss(new, learner, behaviour, advantages, mask, delta, rho_bar, **switches)
    assert loss.item() == pytest.approx(total / int(mask.sum()), rel=1e-5)
    assert metrics["filtered_fraction"].item() == pytest.approx(dropped / int(mask.sum()))
    assert metrics["filter_triggered"].item() == pytest.approx(triggered / 5)
    assert 0 < dropped < int(mask.sum()) or not use_filter


def test_tv_filter_keeps_what_points_inward():
    behaviour, mask = torch.zeros(3, 4), torch.tensor([[True] * 4, [True] * 3 + [False], [False] * 4])
    new = torch.tensor([[0.5, -0.5, 0.5, 0.0], [0.01, -0.01, 0.0, 9.0], [9.0] * 4])
    advantages = torch.tensor([1.0, 1.0, 1.0])
    keep, tv = vaco_llm.tv_filter(new, torch.full((3, 4), 7.0), behaviour, advantages, mask, 0.05)
    assert tv[0].item() == pytest.approx((2 * (math.exp(0.5) - 1) + 1 - math.exp(-0.5)) / 8)
    assert tv[1].item() == pytest.approx((math.exp(0.01) - math.exp(-0.01)) / 6, rel=1e-4)
    assert tv[2] == 0
    assert keep.tolist() == [[False, True, False, True], [True, True, True, False], [False] * 4]
    keep, _ = vaco_llm.tv_filter(new, behaviour, behaviour, -advantages, mask, 0.05)
    assert keep[0].tolist() == [True, False, True, True]


def test_tv_filter_threshold_is_half_of_delta():
    mask, advantages = torch.ones(1, 1, dtype=torch.bool), torch.ones(1)
    new, zeros = torch.full((1, 1), math.log(1.1)), torch.zeros(1, 1)  # tv = .05
    assert not vaco_llm.tv_filter(new, zeros, zeros, advantages, mask, 0.099)[0].item()
    assert vaco_llm.tv_filter(new, zeros, zeros, advantages, mask, 0.101)[0].item()


def test_filter_follows_the_current_policy():
    """Recomputed with new log-probabilities: the same batch is dropped after a step outward and kept before it."""
    mask, advantages, zeros = torch.ones(1, 2, dtype=torch.bool), torch.ones(1), torch.zeros(1, 2)
    fractions = []
    for new in (zeros, zeros + 0.3):
        fractions.append(vaco(new, zeros, zeros, advantages, mask)[1]["filtered_fraction"].item())
    assert fractions == [0.0, 1.0]


def test_vaco_at_lag_0_is_grpo():
    _, _, behaviour, advantages, mask = random_batch(3)
    gradients, losses = [], []
    for loss in (grpo, vaco):
        new = behaviour.clone().requires_grad_()
        value, metrics = loss(new, behaviour, behaviour, advantages, mask)
        value.backward()
        gradients.append(new.grad)
        losses.append(value.detach())
        assert not any(metrics.values())  # nothing is clipped, nothing filtered
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_first_gradient_is_the_ratio_once():
    """One token with pi_T/mu = .5 and A = 1: the gradient is .5 grad log pi. At 4 it is rho_bar."""
    mask, advantages = torch.ones(1, 1, dtype=torch.bool), torch.ones(1)
    for behaviour, expected in ((0.0, 0.5), (math.log(0.5) - math.log(4), 2.0)):
        new = torch.full((1, 1), math.log(0.5), requires_grad=True)
        logprobs = (new, new.detach(), torch.full((1, 1), behaviour))
        vaco_llm.vaco_loss(*logprobs, advantages, mask, 10.0, 2.0)[0].backward()
        assert new.grad.item() == pytest.approx(-expected)
    new = torch.full((1, 1), math.log(0.5), requires_grad=True)
    vaco(new, new, torch.zeros(1, 1), advantages, mask, realign=False, tv_filter=False)[0].backward()
    assert new.grad.item() == pytest.approx(-1.0)  # and none flows through what stands below the fraction


@pytest.mark.parametrize("fill", [1e6, -1e6, math.nan, math.inf])
@LOSSES
def test_padding_never_enters(loss, fill):
    def run(*batch):
        new = batch[0].detach().clone().requires_grad_()
        value, metrics = loss(new, *batch[1:])
        value.backward()
        return value.detach(), new.grad, metrics

    new, learner, behaviour, advantages, mask = random_batch(4)
    value, gradient, metrics = run(new, learner, behaviour, advantages, mask)
    for filled in range(1, 8):  # any of the three, or all
        batch = [torch.where(mask, x, fill) if filled >> i & 1 else x for i, x in enumerate((new, learner, behaviour))]
        other_value, other_gradient, other_metrics = run(*batch, advantages, mask)
        assert torch.equal(value, other_value)
        assert torch.equal(gradient, other_gradient)
        assert all(torch.equal(metrics[name], other_metrics[name]) for name in metrics)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("masked", [True, False])
@LOSSES
def test_infinite_ratio_is_dropped(loss, masked, sign):
    new = torch.tensor([[-2.0, -1.0], [-1.0, -1.0]], requires_grad=True)
    behaviour = torch.tensor([[-91.0, -1.0], [-1.0, -1.0]])
    mask = torch.tensor([[not masked, True], [True, True]])
    for learner in (behaviour, new.detach()):
        value, metrics = loss(new, learner, behaviour, sign * torch.tensor([1.0, -0.5]), mask)
        (gradient,) = torch.autograd.grad(value, new)
        assert value.isfinite()
        assert gradient.isfinite().all()
        assert gradient[0, 0] == 0
        assert gradient[1, 0] != 0
        assert all(x.isfinite() for x in metrics.values())
    keep, tv = vaco_llm.tv_filter(new, behaviour, behaviour, sign * torch.ones(2), mask, 0.05)
    assert not keep[0, 0]
    assert not tv.isnan().any()


@pytest.mark.parametrize("more", [{}, {"loss_type": "sequence-mean"}, {"loss_type": "constant", "max_length": 7}])
def test_grpo_of_nothing_is_zero(more):
    new, _, behaviour, advantages, mask = random_batch(0)
    value, _ = grpo(new, None, behaviour, advantages, torch.zeros_like(mask), **more)
    value.backward()
    assert value == 0
    assert (new.grad == 0).all()


def test_vaco_of_nothing_is_zero():
    new, learner, behaviour, advantages, mask = random_batch(0)
    value, metrics = vaco(new, learner, behaviour, advantages, torch.zeros_like(mask))
    value.backward()
    assert value == 0
    assert (new.grad == 0).all()
    assert metrics["filtered_fraction"] == 0


@LOSSES
def test_parts_weighted_by_their_tokens_make_the_whole(loss):
    """The average is over the tokens of the whole minibatch: 2 x 1 completions, each weighted by its share of the
    tokens, give the gradient of 1 x 2, the plain mean of their means does not."""
    whole = random_batch(1, B=2)
    whole[4][:] = torch.arange(7) < torch.tensor([[2], [7]])
    (expected,) = torch.autograd.grad(loss(*whole)[0], whole[0])
    shares = whole[4].sum(1) / whole[4].sum()
    parts = [loss(*(x[i : i + 1] for x in whole))[0] for i in range(2)]
    (weighted,) = torch.autograd.grad(
        sum(s * p for s, p in zip(shares, parts, strict=True)), whole[0], retain_graph=True
    )
    (plain,) = torch.autograd.grad(sum(parts) / 2, whole[0])
    torch.testing.assert_close(weighted, expected)
    assert not torch.allclose(plain, expected)


@LOSSES
def test_wrong_shapes_are_refused(loss):
    new, learner, behaviour, advantages, mask = random_batch(0)
    for batch in (
        (new, learner, behaviour, advantages[:, None].expand(5, 7), mask),
        (new, learner, behaviour, advantages[:3], mask),
        (new, learner, behaviour, advantages, mask[:, :1]),
        (new, learner, behaviour[:1], advantages, mask),
    ):
        with pytest.raises(AssertionError):
            loss(*batch)


# -------------------------------------------------------------------------------------------------------------- KL


@PAIR
@pytest.mark.parametrize("ones", [6, 5, 8], ids=["on-policy", "mu=.5", "mu=.8"])
def test_kl_has_the_gradient_of_the_kl(script, ones):
    """Bernoulli p = .6, reference .3; ten tokens in the proportion of mu make the expectation exact."""
    logit = torch.tensor(math.log(0.6 / 0.4), requires_grad=True)
    tokens = torch.tensor([[1.0] * ones + [0.0] * (10 - ones)])
    new = torch.where(tokens == 1, nn_logsigmoid(logit), nn_logsigmoid(-logit))
    mu = torch.where(tokens == 1, math.log(ones / 10), math.log(1 - ones / 10))
    reference = torch.where(tokens == 1, math.log(0.3), math.log(0.7))
    kl = script.kl_penalty(new, mu, reference, torch.ones_like(tokens, dtype=torch.bool))
    kl.backward()
    assert kl.item() == pytest.approx(0.6 * math.log(2) + 0.4 * math.log(4 / 7), abs=1e-6)
    assert logit.grad.item() == pytest.approx(0.30066, abs=5e-6)


def nn_logsigmoid(x):
    return torch.nn.functional.logsigmoid(x)


@PAIR
def test_kl_ignores_padding_and_overflow(script):
    new, learner, behaviour, _, mask = random_batch(2)
    expected = script.kl_penalty(new, behaviour, learner, mask)
    filled = [torch.where(mask, x, math.nan) for x in (new, behaviour, learner)]
    assert torch.equal(script.kl_penalty(*filled, mask), expected)
    behaviour = behaviour.clone()
    behaviour[0, 0] = -120.0
    kl = script.kl_penalty(new, behaviour, learner, mask)
    (gradient,) = torch.autograd.grad(kl, new)
    assert kl.isfinite()
    assert gradient.isfinite().all()


# ------------------------------------------------------------------------------------------------------------- lag


@PAIR
def test_backward_lag_of_known_ratios(script):
    w = torch.tensor([0.5, 1.5, 2.0, 1.0])
    metrics = script.backward_lag(w.log(), torch.zeros(4))
    assert metrics["lag/tv_backward"] == pytest.approx(0.25)
    assert metrics["lag/ess"] == pytest.approx(25 / (4 * 7.5))


@PAIR
@pytest.mark.parametrize("lag", [0, 1, 3, 20])
def test_queue_ages(script, lag):
    """The loop of `train`: as many updates at every lag, the k-th batch (from 0) has age min(k, lag), none is lost."""
    queue, updates, made, used, ages = script.RolloutLag(lag), 10, 0, [], []
    for k in range(updates):
        while not queue.full() and made < updates:
            queue.push(made, version=k)
            made += 1
        batch, age = queue.pop(version=k)
        used.append(batch)
        ages.append(age)
    assert used == list(range(updates))
    assert ages == [min(k, lag) for k in range(updates)]


@PAIR
def test_masked_mean_and_total_variation(script):
    mask = torch.tensor([[True, True, False], [False, False, False]])
    x = torch.tensor([[1.0, 3.0, math.nan], [math.inf, 1e6, -1e6]])
    assert script.masked_mean(x, mask) == 2
    assert script.masked_mean(x, torch.zeros_like(mask)) == 0
    with pytest.raises(AssertionError):
        script.masked_mean(x, mask[:, 0])
    assert script.total_variation(x, torch.zeros(2, 3), mask).tolist() == pytest.approx(
        [(math.exp(1) - 1 + math.exp(3) - 1) / 4, 0.0]
    )


def test_filter_refuses_advantages_per_token():
    logprobs, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for shape in ((2, 3), (2, 1), (1,), (3,)):
        with pytest.raises(AssertionError):
            vaco_llm.tv_filter(logprobs, logprobs, logprobs, torch.ones(shape), mask, 0.05)


@pytest.mark.parametrize(
    ("completion", "reference", "reward"),
    [("0.5", ".5", 1), ("#### .5", "0.5", 1), ("\\boxed{} 7, so 8", "8", 1), ("####" * 5000, "1", 0)],
)
def test_numbers_at_the_edge(completion, reference, reward):
    assert vaco_llm.answer_reward(completion, reference) == reward
