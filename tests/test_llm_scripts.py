"""The two LLM scripts from their tasks to their files: problems, GPT, sampling, updates, and real runs as processes."""

import copy
import csv
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import grpo_llm
import vaco_llm

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"grpo_llm": grpo_llm, "vaco_llm": vaco_llm}
PAIR = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
TINY = {"num_terms": 2, "ops": "+", "n_embd": 32, "warm_start_steps": 100, "learning_rate": 1e-3}
TINY |= {"num_prompts": 4, "num_generations": 4, "num_updates": 6, "eval_problems": 16, "pass_k": 2, "num_evals": 2}
TINY_FLAGS = [x for name, value in TINY.items() for x in (f"--{name.replace('_', '-')}", str(value))]


def build(script, n_layer=1, **changes):
    """Args, task, tokenizer and a GPT with random weights (large enough that no distribution is flat)."""
    args = script.Args(**TINY | changes)
    task = script.make_task(args)
    tokenizer = script.CharTokenizer(task.alphabet)
    torch.manual_seed(3)
    context = task.prompt_length + args.completion_length
    model = script.GPT(len(tokenizer.alphabet), context, n_layer, 2, args.n_embd)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return args, task, tokenizer, model


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def make_batch(script, args, task, tokenizer, model):
    batch = script.rollout(model, task, tokenizer, args, np.random.default_rng(0), generator())
    batch.pop("seconds")
    with torch.no_grad():
        batch["learner_logprobs"], _ = script.get_logprobs(model, batch, args.temperature)
    return batch | {"reference_logprobs": batch["learner_logprobs"]}


def adamw(model, lr=1e-2):
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)


# ----------------------------------------------------------------------------------------------------------- tasks

ARITHMETIC = [(6, 1, "+-"), (2, 1, "+"), (5, 1, "+-*"), (3, 2, "*-"), (3, 3, "-"), (4, 2, "+"), (4, 1, "*")]


@PAIR
@pytest.mark.parametrize(("num_terms", "num_digits", "ops"), ARITHMETIC)
def test_arithmetic(script, num_terms, num_digits, ops):
    task = script.make_task(script.Args(num_terms=num_terms, num_digits=num_digits, ops=ops))
    rng, lengths = np.random.default_rng(0), []
    for _ in range(2000):
        problem = task.sample(rng)
        assert set(problem.prompt + problem.solution) <= set(task.alphabet)
        assert len(problem.prompt) <= task.prompt_length
        assert len(re.findall(r"\d+", problem.prompt)) == num_terms
        results = problem.solution.split(";")
        assert len(results) == num_terms - 1
        lengths.append(len(problem.solution) + 1)
        expression = re.sub(r"\b0+(?=\d)", "", problem.prompt[:-1])
        assert eval(expression) == int(results[-1]) == int(problem.answer)
        assert task.reward(problem.solution, problem) == 1
        if "*" not in ops:  # the results are the running sums
            ends = [m.end() for m in re.finditer(r"\d+", expression)]
            assert [int(x) for x in results] == [eval(expression[:end]) for end in ends[1:]]
    assert max(lengths) <= task.solution_length
    if "*" not in ops:
        assert max(lengths) >= task.solution_length - num_terms  # and the bound is not far off


def test_arithmetic_example():
    """The documented example, and the precedence of products."""

    class Fixed:
        def __init__(self, *draws):
            self.draws = list(draws)

        def integers(self, low, high=None, size=None):
            return np.array(self.draws.pop(0))

    task = grpo_llm.make_task(grpo_llm.Args(ops="+-*"))
    problem = task.sample(Fixed([7, 5, 3, 8, 2, 9], [0, 1, 0, 1, 0]))
    assert problem == ("7+5-3+8-2+9=", "12;9;17;15;24", "24")
    task = grpo_llm.make_task(grpo_llm.Args(ops="+-*", num_terms=5))
    assert task.sample(Fixed([9, 2, 3, 4, 1], [1, 2, 2, 0])) == ("9-2*3*4+1=", "6;24;-15;-14", "-14")


@PAIR
def test_problems_are_disjoint_and_the_split_is_stable(script):
    task, rng = script.make_task(script.Args(num_terms=2, ops="+-")), np.random.default_rng(0)
    train = {p.prompt for p in script.sample_problems(task, 3000, rng, held_out=False)}
    held_out = {p.prompt for p in script.sample_problems(task, 1000, rng, held_out=True)}
    assert not train & held_out
    assert len(train | held_out) == 200  # every problem is one or the other
    assert 10 <= len(held_out) <= 40
    assert [script.is_held_out(f"{i}+1=") for i in range(40)] == [i in HELD_OUT for i in range(40)]


HELD_OUT = (14, 24)  # the same in every process and for ever: otherwise a cached warm start has seen what is held out


@PAIR
def test_a_task_without_held_out_problems_is_refused(script):
    class One:
        def sample(self, rng):
            return script.Problem("1+1=", "2", "2")

    with pytest.raises(ValueError, match="too few problems"):
        script.sample_problems(One(), 2, np.random.default_rng(0), held_out=not script.is_held_out("1+1="))


@PAIR
def test_tokenizer(script):
    tokenizer = script.CharTokenizer("0123456789+-=;")
    assert len(tokenizer.alphabet) == 15
    left, padding = tokenizer.encode(["1+2=", "10+20="], left=True)
    assert left.tolist() == [[14, 14, 1, 10, 2, 12], [1, 0, 10, 2, 0, 12]]
    assert padding.tolist() == [2, 0]
    right, padding = tokenizer.encode(["3$", "30$"])
    assert right.tolist() == [[3, 14, 14], [3, 0, 14]]
    assert padding.tolist() == [1, 0]
    assert tokenizer.decode(torch.tensor([[1, 2, 14, 3], [14, 1, 1, 1], [1, 2, 3, 4]])) == ["12", "", "1234"]


# ------------------------------------------------------------------------------------------------- GPT and sampling


@PAIR
def test_default_model_size(script):
    args = script.Args()
    task = script.make_task(args)
    model = script.new_model(args, task, script.CharTokenizer(task.alphabet), torch.device("cpu"))
    assert 220_000 < sum(x.numel() for x in model.parameters()) < 240_000
    assert not any(isinstance(x, torch.nn.Dropout) for x in model.modules())


@PAIR
def test_gpt_is_causal(script):
    _, _, _, model = build(script, n_layer=2)
    tokens, padding = torch.randint(11, (2, 6), generator=generator()), torch.zeros(2, dtype=torch.long)
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    before, after = model(tokens, padding), model(changed, padding)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


@PAIR
def test_gpt_agrees_with_attention_by_hand(script):
    _, _, _, model = build(script)
    tokens = torch.randint(11, (3, 5), generator=generator())
    block = model.blocks[0]
    x = model.wte.weight[tokens] + model.wpe.weight[:5]
    q, k, v = block.c_attn(block.ln_1(x)).split(32, -1)
    heads = []
    for h in (slice(0, 16), slice(16, 32)):
        scores = q[..., h] @ k[..., h].transpose(1, 2) / math.sqrt(16)
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v[..., h])
    x = x + block.c_proj(torch.cat(heads, -1))
    x = x + block.mlp(block.ln_2(x))
    expected = model.ln_f(x) @ model.lm_head.weight.T
    torch.testing.assert_close(model(tokens, torch.zeros(3, dtype=torch.long)), expected, atol=1e-5, rtol=1e-5)


@PAIR
def test_the_learner_has_no_dropout(script):
    """Else the first ratio of an update is not 1: the learner scores in training mode what it sampled in evaluation."""
    _, _, tokenizer, model = build(script)
    tokens, none = tokenizer.encode(["1+2=", "3+4="], left=True)
    expected = model.eval()(tokens, none)
    assert all(torch.equal(model.train()(tokens, none), expected) for _ in range(3))


@PAIR
def test_padding_on_the_left_changes_nothing(script):
    _, _, tokenizer, _ = build(script)
    model = script.GPT(len(tokenizer.alphabet), 32, 2, 2, 16)
    prompts = ["1+2=", "3+4=", "0+9="]
    alone, none = tokenizer.encode(prompts, left=True)
    padded = torch.cat((torch.randint(11, (3, 9), generator=generator()), alone), 1)
    expected, got = model(alone, none), model(padded, none + 9)[:, 9:]
    assert (got - expected).abs().max() < 1e-5
    assert model(padded, none + 9).isfinite().all()  # the padding too: NaN would reach the gradient


@PAIR
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_sampling_with_cache_equals_a_full_forward(script, temperature):
    changes = {"n_layer": 2, "num_digits": 2, "num_terms": 3, "max_new_tokens": 80}  # the cache grows on the way
    args, task, tokenizer, model = build(script, temperature=temperature, **changes)
    problems = script.sample_problems(task, 32, np.random.default_rng(0), held_out=False)
    assert len({len(p.prompt) for p in problems}) > 2
    batch, texts = script.generate(model, task, tokenizer, problems, 2, args, generator())
    logprobs, _ = script.get_logprobs(model, batch, temperature)
    mask = batch["mask"]
    assert 40 < mask.shape[1] <= 80
    assert (batch["completions"][::2] != batch["completions"][1::2]).any()  # two of each prompt, each its own
    assert (logprobs - batch["logprobs"])[mask].abs().max() < 1e-5
    assert ((logprobs - batch["logprobs"])[mask].exp() - 1).abs().max() < 1e-5
    for i in (0, 7):  # and they are those of the prompt and completion alone, by log_softmax
        text = problems[i // 2].prompt + texts[i] + ("" if batch["truncated"][i] else script.EOS)
        tokens, none = tokenizer.encode([text])
        full = (model(tokens, none) / temperature).log_softmax(-1)[0]
        alone = [full[t - 1, tokens[0, t]].item() for t in range(len(problems[i // 2].prompt), len(text))]
        np.testing.assert_allclose(alone, batch["logprobs"][i][mask[i]], atol=1e-5)


@PAIR
def test_sampling_follows_the_distribution(script):
    _, _, tokenizer, model = build(script)
    prompt, padding = tokenizer.encode(["1+2="], left=True)
    group = torch.zeros(20000, dtype=torch.long)
    tokens, _ = script.sample(model, prompt, padding, group, 1, 1.3, tokenizer.eos_id, generator())
    with torch.no_grad():
        probs = (model(prompt, padding)[0, -1] / 1.3).softmax(-1)
    frequencies = torch.bincount(tokens[:, 0], minlength=len(probs)) / 20000
    assert (frequencies - probs).abs().max() < 0.015
    greedy, _ = script.sample(model, prompt, padding, group[:1], 1, 1.3, tokenizer.eos_id)
    assert greedy.item() == probs.argmax()


@PAIR
def test_one_pass_and_two_give_the_same_scores(script):
    """Prompts read once for all their completions, or each with its completion where a minibatch is small."""
    args, task, tokenizer, model = build(script, n_layer=2, num_digits=2)
    batch = make_batch(script, args, task, tokenizer, model)
    assert (batch["padding"] > 0).any()
    rows = torch.tensor([9, 2, 11])
    few = {name: x if name in ("prompts", "padding") else x[rows] for name, x in batch.items()}
    scores, _ = script.get_logprobs(model, few, args.temperature)
    torch.testing.assert_close(scores, batch["learner_logprobs"][rows], atol=1e-5, rtol=0)
    one_token = batch | {"completions": batch["completions"][:, :1]}
    expected = batch["learner_logprobs"][:, :1]
    torch.testing.assert_close(script.get_logprobs(model, one_token, args.temperature)[0], expected, atol=1e-5, rtol=0)


@PAIR
def test_a_rollout_draws_as_many_numbers_whatever_its_lengths(script):
    args, task, tokenizer, model = build(script)
    states, lengths = [], []
    for weight in (0.0, 100.0):
        with torch.no_grad():  # ends at once, or as before
            model.ln_f.bias += weight * model.lm_head.weight[tokenizer.eos_id]
        stream = generator()
        lengths.append(script.rollout(model, task, tokenizer, args, np.random.default_rng(0), stream)["mask"].shape[1])
        states.append(stream.get_state())
    assert lengths[0] > lengths[1]
    assert torch.equal(*states)


class Rigged(torch.nn.Module):
    """Puts probability 1 on the token that follows in its text, whatever the tokens it is given."""

    def __init__(self, tokens, vocab_size):
        super().__init__()
        self.tokens, self.vocab_size = tokens, vocab_size
        self.wte = torch.nn.Embedding(1, 1)

    def new_cache(self, batch, length):
        return []

    def forward(self, tokens, padding, cache=None, past=0):
        following = self.tokens.roll(-1, 1)[:, past : past + tokens.shape[1]]
        return 1e4 * torch.nn.functional.one_hot(following, self.vocab_size).float()


@PAIR
def test_rigged_model_has_logprob_zero(script):
    _, _, tokenizer, _ = build(script)
    prompts, padding = tokenizer.encode(["1+2=", "3+4="], left=True)
    solutions, _ = tokenizer.encode(["3$", "12$"])
    mask, _ = script.completion_mask(solutions, [tokenizer.eos_id])
    tokens = torch.cat((prompts, solutions), 1)
    group = torch.arange(2)
    batch = {"prompts": prompts, "padding": padding, "group": group, "completions": solutions, "mask": mask}
    model = Rigged(tokens, len(tokenizer.alphabet))
    assert (script.get_logprobs(model, batch, 1.0)[0][mask] == 0).all()
    completions, logprobs = script.sample(model, prompts, padding, group, 3, 1.0, tokenizer.eos_id, generator())
    assert torch.equal(completions, solutions)
    assert (logprobs == 0).all()


@PAIR
@pytest.mark.parametrize(
    ("completion", "reward", "truncated", "length"),
    [("3$", 1, 0, 2), ("$", 0, 0, 1), ("33", 0, 1, 2), ("3=", 0, 1, 2), ("=3", 0, 1, 2)],
)
def test_reward_needs_the_answer_in_the_completion_and_an_end(script, completion, reward, truncated, length):
    args, task, tokenizer, _ = build(script)
    args = dataclasses.replace(args, max_new_tokens=3)
    problem = script.Problem("1+2=", "3", "3") if completion != "$" else script.Problem("3+0=", "3", "3")
    tokens, _ = tokenizer.encode([problem.prompt + completion.ljust(3, "=")])
    model = Rigged(tokens, len(tokenizer.alphabet))
    batch, texts = script.generate(model, task, tokenizer, [problem], 1, args, generator())
    assert batch["rewards"].tolist() == [reward]
    assert batch["truncated"].tolist() == [bool(truncated)]
    assert texts[0] == completion.ljust(3, "=").split("$")[0]


# ---------------------------------------------------------------------------------------------------------- update


@PAIR
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_first_ratio_is_one(script, temperature):
    args, task, tokenizer, model = build(script, temperature=temperature, num_generations=16)
    batch = learnable(make_batch(script, args, task, tokenizer, model))
    _, metrics = script.gradient_step(model, adamw(model), batch, args)
    assert abs(metrics["losses/ratio_max"] - 1) < 1e-5
    assert metrics["lag/tv_behaviour_mean"] < 1e-5
    assert metrics["lag/tv_forward_mean"] < 1e-5
    assert (
        script.gradient_step(model, adamw(model), batch, args)[1]["lag/tv_forward_mean"] > 1e-5
    )  # the weights did move


@PAIR
def test_the_only_step_of_an_update_finds_what_pi_T_says(script):
    """The same as if it had been scored before, in the order of the batch, and with the same gradient."""
    args, task, tokenizer, model = build(script)
    twin = copy.deepcopy(model)
    batch = learnable(make_batch(script, args, task, tokenizer, model))
    batch["logprobs"] = batch["logprobs"] + 0.1 * torch.randn(batch["mask"].shape, generator=generator())
    expected = batch.pop("learner_logprobs")
    metrics = script.update(model, adamw(model), batch, args, np.random.default_rng(0))
    torch.testing.assert_close(batch["learner_logprobs"], expected, atol=1e-5, rtol=0)
    assert metrics["lag/tv_forward_mean"].tolist() == [0.0]
    script.gradient_step(twin, adamw(twin), batch, args)
    for x, y in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, atol=1e-5, rtol=1e-4)


@PAIR
@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_a_step_looks_at_no_number(script, kl_coef):
    """So that a GPU is never waited for: on the meta device, where there are no numbers, looking is an error."""
    args, task, tokenizer, model = build(script, kl_coef=kl_coef)
    batch = make_batch(script, args, task, tokenizer, model)
    batch = {name: x.to("meta") for name, x in learnable(batch).items()}
    model = model.to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # the fused AdamW refuses this device
    _, metrics = script.gradient_step(model, optimizer, batch, args)
    assert {x.device.type for x in metrics.values()} == {"meta"}
    with pytest.raises(RuntimeError):
        metrics["losses/policy_loss"].item()


def learnable(batch):
    return batch | {"advantages": torch.linspace(-1, 1, len(batch["mask"]))}


@PAIR
def test_step_without_signal_is_skipped_and_counted(script):
    args, task, tokenizer, model = build(script, kl_coef=0.5, num_minibatches=2, update_epochs=3)
    batch = make_batch(script, args, task, tokenizer, model)
    batch["reference_logprobs"] = batch["reference_logprobs"] - 0.5
    optimizer = adamw(model)
    rng = np.random.default_rng(0)
    metrics = script.update(model, optimizer, learnable(batch), args, rng)  # leaves a momentum
    assert metrics["charts/skipped_steps"].tolist() == [0.0] * 6
    before = [x.detach().clone() for x in model.parameters()]
    equal = batch | {"advantages": script.group_advantages(torch.full((4, 4), 0.3)).flatten()}
    metrics = script.update(model, optimizer, equal, args, rng)
    assert metrics["charts/skipped_steps"].tolist() == [1.0] * 6
    assert metrics["losses/grad_norm"].tolist() == [0.0] * 6
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), before, strict=True))


@PAIR
def test_all_truncated_is_skipped(script):
    args, task, tokenizer, model = build(script)
    with torch.no_grad():  # a model that never ends
        model.ln_f.bias += 100 * torch.nn.functional.normalize(
            model.lm_head.weight[0] - model.lm_head.weight[-1], dim=0
        )
    batch = make_batch(script, args, task, tokenizer, model)
    assert batch["truncated"].all()
    assert batch["mask"].all()
    assert (batch["rewards"] == 0).all()
    metrics = script.update(model, adamw(model), batch, args, np.random.default_rng(0))
    assert metrics["charts/skipped_steps"].tolist() == [1.0]
    assert all(x.isfinite().all() for x in metrics.values())


@PAIR
def test_empty_masks_do_no_harm(script):
    args, task, tokenizer, model = build(script)
    batch = learnable(make_batch(script, args, task, tokenizer, model))
    batch["mask"] = torch.zeros_like(batch["mask"])
    before = [x.clone() for x in model.parameters()]
    metrics = script.update(model, adamw(model), batch, args, np.random.default_rng(0))
    assert all(x.isfinite() for x in metrics.values())
    assert metrics["losses/policy_loss"] == 0
    assert metrics["charts/skipped_steps"] == 1
    assert all(torch.equal(x, y) for x, y in zip(before, model.parameters(), strict=True))


@PAIR
def test_update_does_every_minibatch_and_sees_each_completion_once_per_epoch(script, monkeypatch):
    args, task, tokenizer, model = build(script, num_minibatches=4, update_epochs=2)
    batch = learnable(make_batch(script, args, task, tokenizer, model)) | {"row": torch.arange(16)}
    seen, steps = [], script.gradient_step
    monkeypatch.setattr(script, "gradient_step", lambda m, o, mb, *a: seen.append(mb["row"]) or steps(m, o, mb, *a))
    metrics = script.update(model, adamw(model), batch, args, np.random.default_rng(0))
    assert len(metrics["losses/policy_loss"]) == 8
    assert [len(rows) for rows in seen] == [4] * 8
    for epoch in (seen[:4], seen[4:]):
        assert sorted(torch.cat(epoch).tolist()) == list(range(16))
    assert (
        metrics["lag/tv_forward_mean"][0] < 1e-5 < metrics["lag/tv_forward_mean"][1]
    )  # the first step is on pi_T itself


@PAIR
def test_weights_of_a_batch_stay_the_same_in_every_epoch(script):
    """What pi_T and mu said of a batch is not touched by the update."""
    args, task, tokenizer, model = build(script, update_epochs=4)
    batch = learnable(make_batch(script, args, task, tokenizer, model))
    before = {name: x.clone() for name, x in batch.items()}
    script.update(model, adamw(model), batch, args, np.random.default_rng(0))
    assert all(torch.equal(batch[name], before[name]) for name in batch)
    assert not any(x.requires_grad for x in batch.values())


@PAIR
def test_a_step_raises_what_was_good(script):
    args, task, tokenizer, model = build(script)
    batch = learnable(make_batch(script, args, task, tokenizer, model))
    optimizer = adamw(model, lr=1e-3)
    for _ in range(5):
        script.gradient_step(model, optimizer, batch, args)
    after, _ = script.get_logprobs(model, batch, args.temperature)
    gain = torch.where(batch["mask"], after - batch["learner_logprobs"], 0.0).sum(1)
    assert gain[batch["advantages"] > 0.5].sum() > 0 > gain[batch["advantages"] < -0.5].sum()


@PAIR
def test_kl_pulls_to_the_warm_start(script):
    args, task, tokenizer, model = build(script, kl_coef=10.0)
    batch = learnable(make_batch(script, args, task, tokenizer, model))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator(1)))
    kls = [
        script.gradient_step(model, adamw(model, 1e-3), batch, args)[1]["losses/kl_warm_start"].item()
        for _ in range(20)
    ]
    assert kls[-1] < kls[0] / 2


@PAIR
def test_nan_stops_the_update(script):
    args, task, tokenizer, model = build(script)
    batch = learnable(make_batch(script, args, task, tokenizer, model))
    with torch.no_grad():
        model.wpe.weight[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        script.update(model, adamw(model), batch, args, np.random.default_rng(0))


# ------------------------------------------------------------------------------------------------------ evaluation


@PAIR
def test_evaluation_is_repeatable_and_changes_nothing(script):
    args, task, tokenizer, model = build(script)
    before = [x.detach().clone() for x in model.parameters()]
    torch.manual_seed(0)
    first, examples = script.evaluate(model, task, tokenizer, args)
    assert torch.equal(torch.rand(3), torch.manual_seed(0) and torch.rand(3))  # nor the global random state
    assert (first, examples) == script.evaluate(model, task, tokenizer, args)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), before, strict=True))
    assert len(examples) == 4
    assert all(script.is_held_out(prompt) for prompt, *_ in examples)
    assert first["sampled_accuracy"] <= first["pass_at_k"] <= args.pass_k * first["sampled_accuracy"]
    p = first["greedy_accuracy"]
    assert first["greedy_std"] == pytest.approx(math.sqrt(p * (1 - p)), abs=1e-6)


# ------------------------------------------------------------------------------------------------------------ runs


def run(script, *flags, timeout=120):
    command = [sys.executable, str(ROOT / f"{script}.py"), *map(str, flags)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)


def table(path):
    with open(path) as file:
        return list(csv.DictReader(file))


TIMING = (
    "charts/SPS",
    "charts/seconds",
    "charts/tokens_per_second",
    "charts/sampling_seconds",
    "charts/training_seconds",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four real runs: both scripts at lag 2, one of them again, and at lag 0. The first makes the warm start."""
    folder = tmp_path_factory.mktemp("runs")
    jobs = {"grpo": ("grpo_llm", 2), "vaco": ("vaco_llm", 2), "again": ("vaco_llm", 2), "lag0": ("vaco_llm", 0)}
    outputs = {}
    for name, (script, lag) in jobs.items():
        flags = [*TINY_FLAGS, "--run-dir", folder / name, "--warm-start-dir", folder / "warm", "--lag", lag]
        outputs[name] = run(script, *flags, "--num-minibatches", 2, "--checkpoint-every", 4)
        assert outputs[name].returncode == 0, outputs[name].stderr
    return folder, outputs


def test_files_of_a_run(runs):
    folder, outputs = runs
    for name in ("grpo", "vaco"):
        files = {path.name for path in (folder / name).iterdir() if not path.name.startswith("events.out.tfevents")}
        assert files == {"config.json", "evals.csv", "metrics.csv", "model.pt", "checkpoint.pt"}
        evals = table(folder / name / "evals.csv")
        assert list(evals[0])[:4] == ["update", "greedy_accuracy", "greedy_std", "sampled_accuracy"]
        assert [int(row["update"]) for row in evals] == [0, 3, 6]
        assert all(0 <= float(row["greedy_accuracy"]) <= 1 for row in evals)
        config = json.loads((folder / name / "config.json").read_text())
        assert config["script"] == f"{name}_llm"
        assert config["args"]["lag"] == 2
        rows = table(folder / name / "metrics.csv")
        assert [int(row["global_step"]) for row in rows] == list(range(1, 7))
        assert all(math.isfinite(float(x)) for row in rows for x in row.values())
        assert "held-out" in outputs[name].stdout
        assert "minutes left" in outputs[name].stdout
        assert torch.load(folder / name / "checkpoint.pt", weights_only=True)["reference"] is None  # no KL, no copy
    grpo, vaco = (set(table(folder / name / "metrics.csv")[0]) for name in ("grpo", "vaco"))
    assert grpo - vaco == {"losses/clipfrac"}
    assert vaco - grpo == {"lag/filtered_fraction", "lag/filter_triggered"}


def test_ages_and_ratios_of_a_run(runs):
    folder, _ = runs
    rows = table(folder / "vaco/metrics.csv")
    assert [float(row["lag/age_max"]) for row in rows] == [0, 1, 2, 2, 2, 2]
    assert all(float(row["lag/tv_backward"]) > 1e-4 for row in rows[1:])
    assert sum(float(row["charts/skipped_steps"]) for row in rows) < 12
    rows = table(folder / "lag0/metrics.csv")
    assert all(float(row["lag/age_max"]) == 0 for row in rows)
    assert all(float(row["lag/tv_backward"]) < 1e-5 for row in rows)
    assert all(float(row["lag/ess"]) > 1 - 1e-5 for row in rows)


def test_pair_shares_its_random_streams(runs):
    """Same warm start, same problems, same first batches."""
    folder, outputs = runs
    grpo, vaco = (table(folder / name / "metrics.csv") for name in ("grpo", "vaco"))
    assert table(folder / "grpo/evals.csv")[0] == table(folder / "vaco/evals.csv")[0]
    for column in ("charts/reward", "charts/completion_length", "losses/entropy"):
        assert grpo[0][column] == vaco[0][column]
    for k in range(3):  # sampled before the first update
        assert grpo[k]["charts/reward"] == vaco[k]["charts/reward"]
    assert len(list((folder / "warm").glob("*.pt"))) == 1
    assert "warm start 100/100" in outputs["grpo"].stdout
    assert "warm start" not in outputs["vaco"].stdout
    assert not list((folder / "warm").glob("*.partial"))


def test_same_seed_twice(runs):
    folder, _ = runs
    first, second = (table(folder / name / "metrics.csv") for name in ("vaco", "again"))
    for row, other in zip(first, second, strict=True):
        assert {k: v for k, v in row.items() if k not in TIMING} == {k: v for k, v in other.items() if k not in TIMING}
    assert (folder / "vaco/evals.csv").read_text() == (folder / "again/evals.csv").read_text()
    states = [torch.load(folder / name / "model.pt", weights_only=True) for name in ("vaco", "again")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_saved_model_gives_the_reported_accuracy(runs):
    folder, _ = runs
    args, task, tokenizer, _ = build(vaco_llm)
    model = vaco_llm.new_model(args, task, tokenizer, torch.device("cpu"))
    model.load_state_dict(torch.load(folder / "vaco/model.pt", weights_only=True))
    scores, _ = vaco_llm.evaluate(model, task, tokenizer, args)
    assert scores == {name: float(x) for name, x in table(folder / "vaco/evals.csv")[-1].items() if name != "update"}


def train(script, run_dir, **changes):
    """A small training in this process, with the warm start beside its folder."""
    run_dir.mkdir()
    args = script.Args(**TINY | {"warm_start_dir": run_dir.parent / "warm"} | changes)
    args.warm_start_dir.mkdir(exist_ok=True)
    return script.train(args, run_dir)


@PAIR
def test_evaluating_does_not_change_the_training(script, tmp_path, capsys):
    a = train(script, tmp_path / "a").state_dict()
    b = train(script, tmp_path / "b", eval_problems=0).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not (tmp_path / "b" / "evals.csv").exists()


@PAIR
def test_seeds_differ_and_share_the_warm_start(script, tmp_path, capsys):
    rewards = []
    for seed in (1, 2):
        train(script, tmp_path / str(seed), seed=seed)
        rewards.append([row["charts/reward"] for row in table(tmp_path / str(seed) / "metrics.csv")])
    assert rewards[0] != rewards[1]
    assert len(list((tmp_path / "warm").iterdir())) == 1


@PAIR
def test_the_model_is_copied_only_for_a_kl(script, tmp_path, monkeypatch, capsys):
    copies = []
    monkeypatch.setattr(script.copy, "deepcopy", lambda x: copies.append(x) or copy.copy(x))
    train(script, tmp_path / "a", num_updates=1)
    assert copies == []
    train(script, tmp_path / "b", num_updates=1, kl_coef=0.1)
    assert len(copies) == 1
    assert all(float(row["losses/kl_warm_start"]) >= 0 for row in table(tmp_path / "b" / "metrics.csv"))


@pytest.mark.parametrize("lag", [0, 3])
@PAIR
def test_a_run_that_diverges_fails(script, lag, tmp_path, main):
    words = ["--run-dir", tmp_path / "run", "--warm-start-dir", tmp_path / "warm", "--learning-rate", "1e30"]
    code, _, err = main(script, *TINY_FLAGS, *words, "--lag", lag, "--num-updates", 20)
    assert code == 1
    assert err.splitlines()[-1].startswith("FloatingPointError: ")
    assert err.splitlines()[-1].endswith(" not finite")
    assert not (tmp_path / "run" / "model.pt").exists()


BAD = [
    ("num_generations", 1, "--num-generations must lie in 2 .. 1000, not 1"),
    ("temperature", 0, "--temperature must lie in"),
    ("temperature", math.nan, "--temperature must lie in"),
    ("lag", -1, "--lag must lie in 0 .."),
    ("max_new_tokens", 5, "--max-new-tokens must not be less"),
    ("learning_rate", math.nan, "--learning-rate must lie in"),
    ("num_minibatches", 5, "--num-minibatches must cut the batch of 128"),
    ("ops", "+/", "--ops must be some of"),
    ("ops", "++", "--ops must be some of"),
    ("num_terms", 1, "--num-terms must lie in 2 .."),
    ("num_digits", 0, "--num-digits must lie in 1 .. 9"),
    ("n_embd", 90, "--n-embd must be a multiple"),
    ("kl_coef", -1, "--kl-coef must lie in 0 .."),
    ("seed", -1, "--seed must lie in"),
]
BAD_OF = {
    "grpo_llm": [
        (f"clip_{side}", x, f"--clip-{side} must lie in") for side in ("low", "high") for x in (0, 2, math.nan)
    ],
    "vaco_llm": [(name, x, "must lie in") for name in ("delta", "rho_bar") for x in (0, -1, math.nan, math.inf)],
}


@PAIR
def test_bad_arguments(script):
    for name, x, message in BAD + BAD_OF[script.__name__]:
        with pytest.raises(ValueError, match=re.escape(message)):
            script.Args(**{name: x})
    for good in ({"delta": 0.2}, {"delta": 1e-9}, {"rho_bar": 1e9}) if script is vaco_llm else ({"clip_high": 0.99},):
        script.Args(**good)


@PAIR
def test_what_cannot_be_used_is_refused_in_a_line(script, tmp_path, main):
    (tmp_path / "file").touch()
    (tmp_path / "used").mkdir()
    cases = [
        (["--device", "nonsense"], "nonsense"),
        (["--warm-start-dir", tmp_path / "file"], "File exists"),
        (["--run-dir", tmp_path / "used"], "File exists"),
        (["--norm-adv", "False"], "write --norm-adv or --no-norm-adv"),
        (["--resume", tmp_path / "nothing"], "No such file or directory"),
        (["--resume", tmp_path / "used", "--seed", "2"], "--resume takes no other flag"),
    ]
    for words, message in cases:
        code, _, err = main(script, *([] if "--resume" in words else TINY_FLAGS), *words)
        assert (code, err.count("\n")) == (2, 1), err
        assert message in err


@PAIR
def test_folders(script, tmp_path, main, monkeypatch):
    """~ is the home folder, text will do from Python, runs of one second get a folder each, a run's file is a run."""
    monkeypatch.setenv("HOME", str(tmp_path))
    small = [*TINY_FLAGS, "--num-updates", 2, "--num-evals", 0, "--checkpoint-every", 1, "--warm-start-dir", "~/warm"]
    assert main(script, *small, "--run-dir=~/x")[0] == 0
    assert (tmp_path / "x" / "model.pt").exists()
    assert (tmp_path / "warm").exists()
    assert script.Args(run_dir="x").run_dir == Path("x")
    monkeypatch.setattr(script.time, "time", lambda: 1e9)
    for _ in range(3):
        assert main(script, *small)[0] == 0
    name = f"arithmetic__{script.__name__}__lag0__1__1000000000"
    assert {path.name for path in (tmp_path / "cwd" / "runs").iterdir()} == {name, f"{name}-2", f"{name}-3"}
    assert main(script, "--resume", tmp_path / "x" / "checkpoint.pt")[0] == 0


class Own:
    """Something else to learn than arithmetic: to say the letter again."""

    alphabet, prompt_length, solution_length = "abcdefghijklmnopqrstuvwxyz", 4, 2

    def __init__(self, args):
        pass

    def sample(self, rng):
        word = "".join(self.letters()[i] for i in rng.integers(0, 26, 4))
        return grpo_llm.Problem(word, word[-1], word[-1])

    def letters(self):
        return "abcdefghijklmnopqrstuvwxyz"

    def reward(self, completion, problem):
        return float(completion == problem.answer)


@PAIR
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"reward": lambda self, completion, problem: True}, None),
        ({"alphabet": "abcdefghijklmnopqrstuvwxyz$"}, "holds $, which ends a completion"),
        ({"alphabet": "abcdefghijklmnopqrstuvwxy"}, "not in the alphabet"),
        ({"prompt_length": 3}, "longer than prompt_length"),
        ({"solution_length": 1}, "longer than prompt_length or solution_length"),
        ({"reward": lambda self, completion, problem: "1"}, "is '1', not a finite number"),
        ({"reward": lambda self, completion, problem: math.nan}, "is nan, not a finite number"),
        ({"reward": lambda self, completion, problem: None}, "is None, not a finite number"),
    ],
)
def test_a_task_of_ones_own_is_checked_before_the_run(script, change, message, tmp_path, main, monkeypatch):
    monkeypatch.setitem(script.TASKS, "arithmetic", type("Changed", (Own,), change))
    words = ["--n-embd", 16, "--warm-start-steps", 3, "--num-updates", 2, "--num-evals", 0, "--num-prompts", 4]
    code, _, err = main(script, *words, "--warm-start-dir", tmp_path / "warm", "--run-dir", tmp_path / "run")
    if message is None:
        assert code == 0, err
        return
    assert (code, err.count("\n")) == (2, 1), err
    assert message in err
    assert not (tmp_path / "run").exists()


@PAIR
def test_an_edited_task_gets_a_warm_start_of_its_own(script, tmp_path, monkeypatch, capsys):
    args, task, tokenizer, _ = build(script, warm_start_dir=tmp_path, warm_start_steps=3)
    script.warm_start(args, task, tokenizer, torch.device("cpu"))
    real = script.Arithmetic.sample
    monkeypatch.setattr(script.Arithmetic, "sample", lambda self, rng: real(self, rng)._replace(solution="1"))
    script.warm_start(args, task, tokenizer, torch.device("cpu"))
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("script", SCRIPTS)
def test_ctrl_c_stops_the_warm_start(script, tmp_path):
    command = [sys.executable, "-u", str(ROOT / f"{script}.py"), "--warm-start-dir", str(tmp_path / "warm")]
    command += ["--run-dir", str(tmp_path / "run"), "--warm-start-steps", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("files in ")  # the warm start comes next
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)  # the warm start itself would take an hour
    assert process.returncode == -signal.SIGINT
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert list((tmp_path / "warm").iterdir()) == []
