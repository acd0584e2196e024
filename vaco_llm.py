# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0"]
# ///
"""VACO (arXiv 2603.01365) for language models under policy lag, in one file. Base script: grpo_llm.py.

Begin with `train`: a run is rollout, update, again and again, with a queue of batches between. What differs from GRPO:
1. Filter: `tv_filter` estimates, in every minibatch and for each completion, the total variation between pi_theta and
   mu; where it exceeds delta/2 it drops the tokens whose gradient would increase it. There is no clip.
2. Align: without a critic, advantages are those of mu's group; each token is weighted by pi_T/mu, up to rho bar.
3. The surrogate is that weight times pi_theta/pi_T, averaged over all valid tokens.
The paper's text was not at hand, and its abstract and reviews leave choices open: a comment marks those made here.

Three policies: mu sampled (the learner some updates ago), pi_T is the learner when an update starts, pi_theta is being
updated. The lag is counted in updates; P prompts x G completions are a batch of B = P G.
"""

import copy
import csv
import hashlib
import json
import math
import os
import re
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from decimal import Decimal
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import tyro
from torch import nn
from torch.nn import functional as F


@dataclass
class Args:
    task: Literal["arithmetic"] = "arithmetic"  # what is to be solved: a class of TASKS
    num_terms: int = 6  # terms of an arithmetic problem
    num_digits: int = 1  # largest number of digits of a number in a problem
    ops: str = "+-"  # operations of an arithmetic problem, some of + - *
    seed: int = 1  # seed of the training; the warm start has its own
    num_updates: int = 100  # updates in all, each on one batch
    num_prompts: int = 16  # P, prompts per batch
    num_generations: int = 8  # G, completions per prompt, whose mean is the baseline
    temperature: float = 1.0  # tau, divides the logits of the sampler and of the learner
    max_new_tokens: int | None = None  # longest completion; None: as the longest worked solution
    num_minibatches: int = 1  # minibatches of each epoch, of M completions; more is more forward lag
    update_epochs: int = 1  # passes over each batch; more is more forward lag
    learning_rate: float = 1e-4  # step size of AdamW, constant after the warm-up
    warmup_updates: int = 10  # updates over which the learning rate rises to its value
    norm_adv: bool = True  # divide advantages by the standard deviation of their group
    kl_coef: float = 0.0  # weight of the KL of pi_theta to the warm start, per nat and token
    max_grad_norm: float = 1.0  # L2 norm to which the gradient is clipped
    lag: int = 0  # L, age in updates of the policy that sampled the batch; 0 is synchronous
    delta: float = 0.05  # the filter acts on a completion whose total variation exceeds delta/2
    rho_bar: float = 2.0  # largest weight pi_T/mu of a token
    realign: bool = True  # weight each token by pi_T/mu; --no-realign: by 1
    tv_filter: bool = True  # drop tokens by total variation; --no-tv-filter: keep all
    tv_center: Literal["behaviour", "learner"] = "behaviour"  # the filter's distance of pi_theta is from mu, or pi_T
    n_embd: int = 96  # width of the GPT
    warm_start_steps: int = 900  # supervised steps on worked solutions
    warm_start_dir: Path = Path("runs/warm_start")  # folder of finished warm starts: all seeds start alike
    eval_problems: int = 384  # held-out problems per evaluation; 0: no evaluation
    pass_k: int = 4  # k, completions sampled per held-out problem
    num_evals: int = 5  # evaluations, evenly spaced, after one of the warm start; 0: none at all
    device: str = "cpu"  # torch device of the GPT: cpu, cuda or cuda:1
    track: bool = False  # log to Weights & Biases too (pip install wandb)
    run_dir: Path | None = None  # folder of the run; None: runs/{task}__{script}__lag{lag}__{seed}__{time}
    checkpoint_every: int = 50  # updates from one checkpoint to the next
    resume: Path | None = None  # folder of a run to go on with; takes no other flag

    def __post_init__(self):
        check(self)
        self.run_dir = self.run_dir and Path(self.run_dir).expanduser()
        self.warm_start_dir = Path(self.warm_start_dir).expanduser()
        self.batch_size = self.num_prompts * self.num_generations
        self.minibatch_size = self.batch_size // self.num_minibatches
        self.completion_length = self.max_new_tokens or make_task(self).solution_length


# --------------------------------------------------------------------------------------------------- tasks and networks

EOS = "$"  # ends every completion; no other character of a task


class Problem(NamedTuple):
    prompt: str
    solution: str  # worked, for the warm start
    answer: str


class Arithmetic:
    """Terms joined by operators, solved by the result of each operator in turn: `7+5-3=` -> `12;9`. A task of your own
    is a class with this __init__, these three attributes and these two methods; TASKS and --task name it."""

    def __init__(self, args: Args):
        self.num_terms, self.num_digits, self.ops = args.num_terms, args.num_digits, args.ops
        largest = 10 ** (self.num_digits * self.num_terms) if "*" in self.ops else self.num_terms * 10**self.num_digits
        number = len(str(largest - 1)) + ("-" in self.ops)
        self.alphabet = "0123456789+-=;" + ("*" if "*" in self.ops else "")
        self.prompt_length = self.num_terms * (self.num_digits + 1)  # at most, in characters
        self.solution_length = (self.num_terms - 1) * (number + 1)  # at most, with the EOS

    def sample(self, rng: np.random.Generator) -> Problem:
        terms = [int(x) for x in rng.integers(0, 10**self.num_digits, self.num_terms)]
        ops = [self.ops[i] for i in rng.integers(0, len(self.ops), self.num_terms - 1)]
        products, summands = [], terms[:1]
        for op, term in zip(ops, terms[1:], strict=True):
            if op == "*":  # before the sums, as usual
                summands[-1] *= term
                products.append(abs(summands[-1]))
            else:
                summands.append(term if op == "+" else -term)
        results = products + list(accumulate(summands))[1:]
        prompt = "".join(f"{op}{term}" for op, term in zip(["", *ops], terms, strict=True)) + "="
        return Problem(prompt, ";".join(map(str, results)), str(results[-1]))

    def reward(self, completion: str, problem: Problem) -> float:
        return answer_reward(completion, problem.answer)


TASKS = {"arithmetic": Arithmetic}


def make_task(args: Args):
    return TASKS[args.task](args)


def is_held_out(prompt: str) -> bool:
    """One prompt in eight is for evaluation only. Not Python's hash, which changes from process to process."""
    return hashlib.sha256(prompt.encode()).digest()[0] < 32


def sample_problems(task, count: int, rng: np.random.Generator, held_out: bool) -> list[Problem]:
    problems = []
    for _ in range(1000 * count):
        problem = task.sample(rng)
        if is_held_out(problem.prompt) == held_out:
            problems.append(problem)
        if len(problems) == count:
            return problems
    raise ValueError("the task has too few problems to hold one in eight out; make it larger")


NUMBER = r"(?<![\d.])-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"


def answer_reward(completion: str, reference: str) -> float:
    """1.0 where the answer of the completion is the number of the reference, else 0.0.

    The answer is the number after `####` or in \\boxed{} if there is one, else the last number; "1,000" is 1000.
    Raises ValueError where the reference holds no number: such a problem would silently reward nothing.
    """

    def answer(text: str) -> Decimal | None:
        marked = re.search(rf"(?:####|\\boxed{{)[^\d\n}}]{{0,40}}?({NUMBER})", text)
        numbers = [marked[1]] if marked else re.findall(NUMBER, text)
        return Decimal(numbers[-1].replace(",", "")) if numbers else None

    expected = None if reference is None else answer(str(reference))
    if expected is None:
        raise ValueError(f"the reference {reference!r} holds no number")
    return float(answer(completion) == expected)


class CharTokenizer:
    """One token per character; the last one is EOS, which also pads."""

    def __init__(self, alphabet: str):
        self.alphabet, self.eos_id = alphabet + EOS, len(alphabet)
        self.ids = {character: i for i, character in enumerate(self.alphabet)}

    def encode(self, texts: list[str], left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (B, L), padded on the right or left, and the number of padding tokens (B,)."""
        length = max(map(len, texts))
        padding = [[self.eos_id] * (length - len(text)) for text in texts]
        rows = [[self.ids[character] for character in text] for text in texts]
        rows = [pad + row if left else row + pad for row, pad in zip(rows, padding, strict=True)]
        return torch.tensor(rows), torch.tensor([len(pad) for pad in padding])

    def decode(self, tokens: torch.Tensor) -> list[str]:
        """(B, L) -> the texts before the first EOS"""
        return ["".join(self.alphabet[i] for i in row).split(EOS)[0] for row in tokens.tolist()]


class Block(nn.Module):
    """One layer of GPT-2: attention and MLP, each after a layer norm and around a residual connection. No dropout: the
    learner must give the sampler's log-probabilities."""

    def __init__(self, n_embd: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x: torch.Tensor, bias: torch.Tensor, cache: torch.Tensor, past: int) -> torch.Tensor:
        """x: (B, L, n_embd), bias: (B, 1, L, K), 0 where a key may be seen, else -inf; K = past + L.

        cache: (2, B, H, K or more, D), keys and values of H heads of width D, of which the first past are there.
        """
        B, L, C = x.shape
        H, D = self.n_head, C // self.n_head
        q, kv = self.c_attn(self.ln_1(x)).split((C, 2 * C), -1)
        q = q.view(B, L, H, D).transpose(1, 2) * D**-0.5
        cache[..., past : past + L, :] = kv.view(B, L, 2, H, D).permute(2, 0, 3, 1, 4)
        k, v = cache[..., : past + L, :]
        y = (q @ k.transpose(2, 3) + bias).softmax(-1) @ v  # by hand: torch's own is slow for so few tokens on a CPU
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, L, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2 in small, as in nanoGPT, for prompts padded on the left."""

    def __init__(self, vocab_size: int, context_length: int, n_layer: int, n_head: int, n_embd: int):
        super().__init__()
        self.context_length = context_length
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(context_length, n_embd)
        self.blocks = nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def new_cache(self, batch: int, length: int) -> list[torch.Tensor]:
        """Room for the keys and values of (batch, length) tokens, one tensor per layer; `forward` fills it."""
        n_head, C = self.blocks[0].n_head, self.wte.embedding_dim
        return [self.wpe.weight.new_zeros(2, batch, n_head, length, C // n_head) for _ in self.blocks]

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor, cache: list | None = None, past: int = 0):
        """Logits (B, L, V) that follow each of the tokens (B, L).

        padding: (B,), how many tokens at the left are none. With a cache, tokens continue the past ones it holds.
        """
        B, L = tokens.shape
        keys = torch.arange(past + L, device=tokens.device)  # (K,)
        queries = keys[past:, None]  # (L, 1)
        seen = (keys <= queries) & (keys >= padding[:, None, None])  # (B, L, K)
        seen |= keys == queries  # a padding token sees itself, since a softmax over nothing is NaN
        bias = torch.where(seen, 0.0, -math.inf).unsqueeze(1)
        positions = (keys[past:] - padding[:, None]).clamp(min=0)  # the first token of every prompt is at 0
        x = self.wte(tokens) + self.wpe(positions)
        for block, kv in zip(self.blocks, cache or self.new_cache(B, L), strict=True):
            x = block(x, bias, kv, past)
        return self.lm_head(self.ln_f(x))


def new_model(args: Args, task, tokenizer: CharTokenizer, device: torch.device) -> GPT:
    context_length = task.prompt_length + args.completion_length
    return GPT(len(tokenizer.alphabet), context_length, n_layer=2, n_head=4, n_embd=args.n_embd).to(device)


def warm_start(args: Args, task, tokenizer: CharTokenizer, device: torch.device) -> GPT:
    """A GPT that has seen worked solutions, from the folder of warm starts or made now. Its random streams are its own,
    so that one warm start serves every seed."""
    torch.manual_seed(0)
    model = new_model(args, task, tokenizer, device)
    examples = sample_problems(task, 8, np.random.default_rng(1), held_out=False)  # another task, another warm start
    settings = [args.n_embd, args.warm_start_steps, model.context_length, torch.__version__, device.type]
    settings += [tokenizer.alphabet, examples]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    path = args.warm_start_dir / f"{args.task}-{key}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    else:
        sft(model, args, task, tokenizer)
        require_finite("warm start", nn.utils.get_total_norm(model.parameters()))
        save(model.state_dict(), path)
    return model


def sft(model: GPT, args: Args, task, tokenizer: CharTokenizer) -> None:
    """Trains the GPT to continue prompts with their worked solutions, by cross-entropy on the solutions' tokens."""
    rng = np.random.default_rng(0)
    steps = args.warm_start_steps
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, step / 50)
        problems = sample_problems(task, 64, rng, held_out=False)
        prompts, padding = tokenizer.encode([problem.prompt for problem in problems], left=True)
        solutions, _ = tokenizer.encode([problem.solution + EOS for problem in problems])
        mask, _ = completion_mask(solutions, [tokenizer.eos_id])
        group = torch.arange(len(problems))
        batch = {"prompts": prompts, "padding": padding, "group": group, "completions": solutions, "mask": mask}
        batch = {name: x.to(model.wte.weight.device) for name, x in batch.items()}
        logprobs, _ = get_logprobs(model, batch, temperature=1.0)
        loss = -masked_mean(logprobs, batch["mask"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step * 10 // steps > (step - 1) * 10 // steps:
            print(f"warm start {step}/{steps} steps, loss {loss.item():.3f}", flush=True)


# --------------------------------------------------------------------------------------------------- lag simulator


class RolloutLag:
    """A queue of batches, first in, first out, as between samplers and a learner that runs behind by `lag` updates:
    `lag` + 1 batches are sampled before the first update, so the k-th batch trained on (from 0) has age min(k, lag)."""

    def __init__(self, lag: int):
        self.lag, self.queue = lag, deque()

    def full(self) -> bool:
        return len(self.queue) > self.lag

    def push(self, batch, version: int) -> None:
        """version: updates that the policy which sampled the batch had seen"""
        self.queue.append((batch, version))

    def pop(self, version: int):
        """The oldest batch, and its age for a learner that has seen `version` updates."""
        batch, sampled_at = self.queue.popleft()
        return batch, version - sampled_at


# -------------------------------------------------------------------------------------------- advantages and losses


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the True places of a mask of x's shape; 0 where there is none. What x holds elsewhere never enters."""
    assert x.shape == mask.shape
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)


def group_advantages(rewards: torch.Tensor, normalize: bool = True) -> torch.Tensor:
    """Rewards (P, G) less the mean of their group, over its std + 1e-4 (ddof 1; arXiv 2402.03300, section 4.1.2).

    normalize=False leaves the std out (Dr.GRPO, arXiv 2503.20783). Exactly 0 in a group of equal rewards. Returns
    (P, G). Raises ValueError for a group of one, which has no baseline.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be (P, G) with G of 2 or more, not {tuple(rewards.shape)}")
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))  # they may be 0/1 or bool
    advantages = rewards - rewards.mean(1, keepdim=True)
    if normalize:
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
    equal = (rewards == rewards[:, :1]).all(1, keepdim=True)  # their mean may be off by a rounding error
    return torch.where(equal, 0.0, advantages)


def completion_mask(tokens: torch.Tensor, eos_ids) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, L) completion tokens -> mask (B, L), True up to the first EOS and on it; truncated (B,), True without one."""
    is_eos = torch.isin(tokens, torch.as_tensor(eos_ids, device=tokens.device).reshape(-1))
    return is_eos.cumsum(1) - is_eos.long() == 0, ~is_eos.any(1)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities (B, L) of tokens (B, L) under the logits (B, L, V) that predict them, in fp32 or better."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    # the same as log_softmax, of which autograd would keep a second (B, L, V)
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def total_variation(newlogprobs: torch.Tensor, oldlogprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Of each completion, the mean over its valid tokens of 1/2 |new/old - 1|: (B, L) -> (B,), 0 without tokens."""
    ratio = torch.where(mask, newlogprobs - oldlogprobs, 0.0).exp()
    return 0.5 * (ratio - 1).abs().sum(1) / mask.sum(1).clamp(min=1)


def masked_ratio(newlogprobs, oldlogprobs, mask) -> tuple[torch.Tensor, torch.Tensor]:
    """The ratio new/old of each token (B, L), and where it counts: on valid tokens, if it does not overflow.

    Elsewhere it is 1 by `where` on its *input*: 0 times an infinite ratio would be NaN, in the loss or in its gradient.
    """
    assert newlogprobs.shape == oldlogprobs.shape == mask.shape
    log_ratio = newlogprobs - oldlogprobs.detach()
    counts = mask & ~torch.where(mask, log_ratio, 0.0).exp().isinf()
    return torch.where(counts, log_ratio, 0.0).exp(), counts


def kl_penalty(newlogprobs, behaviour_logprobs, reference_logprobs, mask):
    """KL(pi_theta || ref) per token, from tokens of mu: the mean of r k3, k3 = ref/pi_theta - 1 - log(ref/pi_theta).

    All (B, L). The gradient goes through r = pi_theta/mu too; that of k3 alone belongs to KL(ref || pi_theta).
    """
    ratio, counts = masked_ratio(newlogprobs, behaviour_logprobs, mask)
    log_ratio, log_ref = (torch.where(counts, x - behaviour_logprobs, 0.0) for x in (newlogprobs, reference_logprobs))
    return masked_mean(log_ref.exp() - ratio * (1 + log_ref - log_ratio), mask)  # r k3, where ref/pi_theta may overflow


@torch.no_grad()
def tv_filter(newlogprobs, learner_logprobs, behaviour_logprobs, advantages, mask, delta):
    """The tokens of a minibatch that keep their gradient (arXiv 2603.01365). Log-probabilities and mask (B, L).

    tv = mean over a completion's valid tokens of 1/2 |pi_theta/mu - 1|. Where tv > delta/2, tokens with
    A (log pi_theta - log mu) > 0 are dropped. Returns (keep, tv), bool (B, L), False on padding, and (B,).
    """
    assert newlogprobs.shape == learner_logprobs.shape == behaviour_logprobs.shape == mask.shape
    assert advantages.shape == mask.shape[:1]
    # a choice the paper leaves open: the distance is from mu. From pi_T it is 0 at the first step of every update, so
    # with one step per batch nothing would ever be dropped, however far pi_T has gone from mu
    tv = total_variation(newlogprobs, behaviour_logprobs, mask)
    log_ratio = torch.where(mask, newlogprobs - behaviour_logprobs, 0.0)
    outward = (tv > delta / 2).unsqueeze(1) & (advantages.unsqueeze(1) * log_ratio > 0)
    overflow = log_ratio.exp().isinf()  # no finite gradient, whichever way it points
    return mask & ~(outward | overflow), tv


find_kept = tv_filter  # `vaco_loss` has an argument of that name


def vaco_loss(
    newlogprobs, learner_logprobs, behaviour_logprobs, advantages, mask, delta, rho_bar,
    *, realign=True, tv_filter=True, center="behaviour"
):  # fmt: skip
    """VACO's filtered surrogate (arXiv 2603.01365). Returns (loss, metrics), metrics of scalar tensors.

    - sum over kept tokens of min(pi_T/mu, rho_bar) (pi_theta/pi_T) A, over the number of *valid* tokens; the first
    factor has no gradient. Log-probabilities and mask (B, L), advantages (B,).
    """
    assert advantages.shape == mask.shape[:1]
    ratio, counts = masked_ratio(newlogprobs, learner_logprobs, mask)  # pi_theta/pi_T
    weight = (learner_logprobs - behaviour_logprobs).exp().clamp(max=rho_bar).detach() if realign else 1.0
    center_logprobs = {"behaviour": behaviour_logprobs, "learner": learner_logprobs}[center]
    delta = delta if tv_filter else math.inf
    keep, tv = find_kept(newlogprobs, learner_logprobs, center_logprobs, advantages, mask, delta)
    keep = keep & counts
    loss = masked_mean(-torch.where(keep, weight * ratio * advantages.unsqueeze(1), 0.0), mask)
    filtered, triggered = masked_mean((~keep).float(), mask), (tv > delta / 2).float().mean()
    return loss, {"filtered_fraction": filtered, "filter_triggered": triggered}


def policy_loss(newlogprobs, learner_logprobs, behaviour_logprobs, advantages, mask, args):
    switches = {"realign": args.realign, "tv_filter": args.tv_filter, "center": args.tv_center}
    loss, metrics = vaco_loss(
        newlogprobs, learner_logprobs, behaviour_logprobs, advantages, mask, args.delta, args.rho_bar, **switches
    )
    return loss, {f"lag/{name}": x for name, x in metrics.items()}


def backward_lag(learner_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor) -> dict:
    """Distance of pi_T from mu over a batch (B,), with w = pi_T/mu: total variation 1/2 mean |w - 1|, and effective
    sample size (sum w)^2 / (B sum w^2)."""
    log_w = (learner_logprobs - behaviour_logprobs).double()
    log_ess = 2 * log_w.logsumexp(0) - (2 * log_w).logsumexp(0) - math.log(len(log_w))  # w^2 may overflow
    return {"lag/tv_backward": float(0.5 * (log_w.exp() - 1).abs().mean()), "lag/ess": float(log_ess.exp())}


# ----------------------------------------------------------------------------------- rollout, update, evaluation, train


def read_prompts(model: GPT, prompts, padding, group, length: int):
    """Reads each of P prompts once, however many completions it has. group: (B,), the prompt of each completion.

    Returns logits (B, 1, V) of the first token, padding (B,) and the cache, with room for length more tokens.
    """
    cache = model.new_cache(len(prompts), prompts.shape[1] + length)
    logits = model(prompts, padding, cache)[:, -1:]
    return logits[group], padding[group], [kv[:, group] for kv in cache]


@torch.no_grad()
def sample(model: GPT, prompts, padding, group, max_new_tokens: int, temperature: float, eos_id: int, generator=None):
    """Continues left-padded prompts (P, L_prompt) until each completion has an EOS or max_new_tokens tokens.

    group: (B,), the prompt of each completion. generator: a torch Generator, or None to take the likeliest token.
    Returns (tokens, logprobs), both (B, L): the completions, of which nothing after an EOS counts, and their
    log-probabilities at the temperature, in fp32.
    """
    logits, padding, cache = read_prompts(model, prompts, padding, group, length=0)
    noise = torch.zeros(max_new_tokens, *logits.shape, device=logits.device)
    if generator is not None:  # Gumbel noise: the largest sum is a draw from the softmax
        noise = -noise.exponential_(generator=generator).log()
    all_logits, tokens, ended = [logits], [], False
    for t in range(max_new_tokens):
        if t % 32 == 1:  # room for 32 more tokens: few completions are as long as they may be
            cache = [F.pad(kv, (0, 0, 0, 32)) for kv in cache]
        if t > 0:
            all_logits.append(model(tokens[-1], padding, cache, prompts.shape[1] + t - 1))
        tokens.append((all_logits[-1] / temperature + noise[t]).argmax(-1))  # (B, 1)
        ended |= tokens[-1] == eos_id
        if ended.all():
            break
    tokens = torch.cat(tokens, 1)
    return tokens, token_logprobs(torch.cat(all_logits, 1), tokens, temperature)


def generate(model: GPT, task, tokenizer: CharTokenizer, problems: list[Problem], G: int, args: Args, generator=None):
    """Completes P problems G times each and rewards the B = P G completions. Returns (batch, texts).

    batch holds prompts (P, L_prompt), the number of padding tokens at their left (P,), of each completion the prompt
    it continues, group (B,), the completions with their mask and behaviour logprobs (B, L), truncated and rewards (B,).
    """
    device = model.wte.weight.device
    prompts, padding = (x.to(device) for x in tokenizer.encode([p.prompt for p in problems], left=True))
    group = torch.arange(len(problems), device=device).repeat_interleave(G)
    completions, logprobs = sample(
        model, prompts, padding, group, args.completion_length, args.temperature, tokenizer.eos_id, generator
    )
    require_finite("logprobs", logprobs)
    mask, truncated = completion_mask(completions, [tokenizer.eos_id])
    texts = tokenizer.decode(completions)
    rewards = []
    for i, cut in enumerate(truncated.tolist()):  # what has no end has no answer, whatever its last number may be
        rewards.append(0.0 if cut else task.reward(texts[i], problems[i // G]))
    batch = {
        "prompts": prompts,
        "padding": padding,
        "group": group,
        "completions": completions,
        "mask": mask,
        "logprobs": logprobs,
        "truncated": truncated,
        "rewards": torch.tensor(rewards, dtype=torch.float32, device=device),
    }
    return batch, texts


def rollout(model: GPT, task, tokenizer: CharTokenizer, args: Args, rng: np.random.Generator, generator) -> dict:
    """G completions each of P new problems, as in `generate`, with their advantages (B,) and the seconds it took."""
    start = time.perf_counter()
    problems = sample_problems(task, args.num_prompts, rng, held_out=False)
    batch, _ = generate(model, task, tokenizer, problems, args.num_generations, args, generator)
    rewards = batch["rewards"].view(args.num_prompts, args.num_generations)
    batch["advantages"] = group_advantages(rewards, args.norm_adv).flatten()
    return batch | {"seconds": time.perf_counter() - start}


def get_logprobs(model: GPT, batch: dict, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (B, L) of a batch's completions, and the logits (B, L, V) that they come from."""
    prompts, padding, group, completions = (batch[name] for name in ("prompts", "padding", "group", "completions"))
    length, inputs = prompts.shape[1], completions[:, :-1]  # the last token predicts nothing that is here
    if len(group) > len(prompts):
        first, padding, cache = read_prompts(model, prompts, padding, group, inputs.shape[1])
        logits = torch.cat((first, model(inputs, padding, cache, length)), 1)
    else:  # one completion per prompt, or a minibatch of few: two passes take longer than one
        logits = model(torch.cat((prompts[group], inputs), 1), padding[group])[:, length - 1 :]
    return token_logprobs(logits, completions, temperature), logits


def gradient_step(model: GPT, optimizer: torch.optim.Optimizer, mb: dict, args: Args, skipped: bool = False):
    """One step on a minibatch of M completions, or only its metrics. Returns (newlogprobs (M, L), losses), losses of
    scalar tensors."""
    mask, behaviour = mb["mask"], mb["logprobs"]
    newlogprobs, logits = get_logprobs(model, mb, args.temperature)  # (M, L), (M, L, V)
    learner = mb.get("learner_logprobs", newlogprobs.detach())
    pg_loss, losses = policy_loss(newlogprobs, learner, behaviour, mb["advantages"], mask, args)
    loss = pg_loss
    if args.kl_coef:
        kl = kl_penalty(newlogprobs, behaviour, mb["reference_logprobs"], mask)
        losses["losses/kl_warm_start"] = kl
        loss = pg_loss + args.kl_coef * kl
    grad_norm = torch.zeros_like(pg_loss)
    if not skipped:
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
    with torch.no_grad():
        newlogprobs = newlogprobs.detach()
        all_logprobs = (logits / args.temperature).log_softmax(-1)
        ratio = torch.where(mask, newlogprobs - behaviour, 0.0).exp()
        log_ratio = torch.where(mask, newlogprobs - learner, 0.0)
        losses["losses/policy_loss"] = pg_loss
        losses["losses/grad_norm"] = grad_norm
        losses["losses/entropy"] = masked_mean(-(all_logprobs.exp() * all_logprobs).sum(-1), mask)
        losses["losses/approx_kl_mean"] = masked_mean(log_ratio.exp() - 1 - log_ratio, mask)
        losses["losses/ratio_mean"] = masked_mean(ratio, mask)
        losses["losses/ratio_max"] = torch.where(mask, ratio, 0.0).max()
        losses["lag/tv_forward_mean"] = total_variation(newlogprobs, learner, mask).mean()
        losses["lag/tv_behaviour_mean"] = total_variation(newlogprobs, behaviour, mask).mean()
        losses["charts/skipped_steps"] = torch.full_like(pg_loss, skipped)
    return newlogprobs, {name: x.detach() for name, x in losses.items()}


def update(model: GPT, optimizer: torch.optim.Optimizer, batch: dict, args: Args, rng: np.random.Generator) -> dict:
    """Epochs x minibatches of gradient steps on a batch, which gets learner_logprobs, those of pi_T, (B, L). Returns
    {name: (gradient steps,)}. Without any advantage a step is skipped: Adam's momentum, and the KL, would move the
    weights all the same. Raises FloatingPointError where a loss or gradient is not finite. A GPU is waited for before
    and after all steps, not between them."""
    if args.num_minibatches * args.update_epochs > 1:  # else the only step's own forward pass is that of pi_T
        with torch.no_grad():
            batch["learner_logprobs"], _ = get_logprobs(model, batch, args.temperature)
    signal = (batch["advantages"] != 0) & batch["mask"].any(1)
    b_inds = torch.as_tensor(np.concatenate([rng.permutation(args.batch_size) for _ in range(args.update_epochs)]))
    skipped = ~signal.cpu()[b_inds].view(-1, args.minibatch_size).any(1)
    b_inds = b_inds.to(signal.device).view(-1, args.minibatch_size)
    all_losses = []
    for mb_inds, skip in zip(b_inds, skipped.tolist(), strict=True):
        mb = {name: x if name in ("prompts", "padding") else x[mb_inds] for name, x in batch.items()}
        newlogprobs, losses = gradient_step(model, optimizer, mb, args, skip)
        all_losses.append(losses)
    if len(all_losses) == 1:
        batch["learner_logprobs"] = newlogprobs[b_inds[0].argsort()]  # back in the batch's order
    losses = {name: torch.stack([step[name] for step in all_losses]).cpu() for name in all_losses[0]}
    for name in ("policy_loss", "grad_norm"):
        require_finite(name, losses[f"losses/{name}"])
    require_finite("learner_logprobs", batch["learner_logprobs"])
    return losses


def require_finite(name: str, x: torch.Tensor) -> None:
    if not x.isfinite().all():
        raise FloatingPointError(f"{name} not finite")


def token_generator(stream: np.random.SeedSequence, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(int(stream.generate_state(1)[0]))


def evaluate(model: GPT, task, tokenizer: CharTokenizer, args: Args) -> tuple[dict, list]:
    """Solves held-out problems with the current policy. One seed always gives the same problems.

    Returns ({name: float}, examples): the accuracy and its standard deviation over problems, both greedy; the accuracy
    of k sampled completions per problem and the share of problems that one of the k solves; and of the sampled ones
    length, truncated share and a few examples (prompt, completion, reference, reward).
    """
    problem_stream, token_stream = np.random.SeedSequence(args.seed).spawn(4)[3].spawn(2)  # `train` has the first three
    problems = sample_problems(task, args.eval_problems, np.random.default_rng(problem_stream), held_out=True)
    greedy, _ = generate(model, task, tokenizer, problems, 1, args)
    generator = token_generator(token_stream, model.wte.weight.device)
    sampled, texts = generate(model, task, tokenizer, problems, args.pass_k, args, generator)
    solved = sampled["rewards"].view(-1, args.pass_k)
    scores = {
        "greedy_accuracy": greedy["rewards"].mean(),
        "greedy_std": greedy["rewards"].std(correction=0),
        "sampled_accuracy": solved.mean(),
        "pass_at_k": solved.amax(1).mean(),
        "completion_length": sampled["mask"].sum(1).float().mean(),
        "truncated": sampled["truncated"].float().mean(),
    }
    examples = []
    for problem, text, reward in zip(problems[:4], texts[:: args.pass_k], solved[:, 0].tolist(), strict=False):
        examples.append((problem.prompt, text, problem.answer, reward))
    return {name: float(x) for name, x in scores.items()}, examples


def train(args: Args, run_dir: Path, saved: dict | None = None) -> GPT:
    """Runs a training, or goes on from a checkpoint, and returns the trained model. Files in run_dir: evals.csv,
    metrics.csv, TensorBoard events, checkpoint.pt and, at the end, model.pt."""
    torch.set_num_threads(1)  # the small GPT gains nothing from more
    device = torch.device(args.device)
    streams = np.random.SeedSequence(args.seed).spawn(3)  # one for each purpose
    problem_rng = np.random.default_rng(streams[0])
    generator = token_generator(streams[1], device)
    minibatch_rng = np.random.default_rng(streams[2])
    task = make_task(args)
    tokenizer = CharTokenizer(task.alphabet)
    model = (new_model if saved else warm_start)(args, task, tokenizer, device)
    reference = copy.deepcopy(model) if args.kl_coef else None  # what the KL is to
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    rollout_lag = RolloutLag(args.lag)
    state = {"iteration": 0, "seconds": 0.0}
    if saved:
        restore(saved, model, reference, optimizer, rollout_lag, [problem_rng, minibatch_rng], generator)
        state = saved["state"]
    log = Log(run_dir, state["iteration"], args.track)

    def log_evaluation(iteration: int) -> None:
        scores, examples = evaluate(model, task, tokenizer, args)
        require_finite("evaluation scores", torch.tensor([*scores.values()]))
        log.write("evals", {"update": iteration} | scores)
        lines = [f"    {prompt} -> {text!r}, reward {reward}" for prompt, text, _, reward in examples]
        log.tensorboard.add_text("eval/samples", "\n".join(lines), iteration)
        accuracies = f"{scores['greedy_accuracy']:.3f} greedy, {scores['sampled_accuracy']:.3f} sampled"
        print(f"update {iteration}, held-out accuracy {accuracies}", flush=True)

    num_evals = args.num_evals if args.eval_problems else 0
    if num_evals and not saved:
        log_evaluation(0)
    for iteration in range(state["iteration"] + 1, args.num_updates + 1):
        lr = args.learning_rate * min(1, iteration / max(1, args.warmup_updates))
        optimizer.param_groups[0]["lr"] = lr

        # sample, and train on what has waited longest; the last batches sampled are those of the last update
        start = time.perf_counter()
        while not rollout_lag.full() and iteration + len(rollout_lag.queue) <= args.num_updates:
            batch = rollout(model, task, tokenizer, args, problem_rng, generator)
            rollout_lag.push(batch, version=iteration - 1)
        training_start = time.perf_counter()
        batch, age = rollout_lag.pop(version=iteration - 1)
        sampling_seconds = batch.pop("seconds")
        if args.kl_coef:
            with torch.no_grad():
                batch["reference_logprobs"], _ = get_logprobs(reference, batch, args.temperature)
        losses = update(model, optimizer, batch, args, minibatch_rng)
        require_finite("norm of the weights", nn.utils.get_total_norm(model.parameters()))

        training_seconds = time.perf_counter() - training_start
        state["iteration"] = iteration
        state["seconds"] += time.perf_counter() - start
        sps = iteration * args.batch_size / state["seconds"]  # completions trained on
        row = {
            "global_step": iteration,
            "charts/learning_rate": lr,
            "charts/SPS": sps,
            "charts/seconds": state["seconds"],
            "charts/sampling_seconds": sampling_seconds,
            "charts/training_seconds": training_seconds,
            "charts/tokens_per_second": int(batch["mask"].sum()) / sampling_seconds,
        }
        log.write("metrics", row | metrics(batch, age, losses, args.num_generations))
        minutes = state["seconds"] / iteration * (args.num_updates - iteration) / 60
        progress = f"{iteration} of {args.num_updates} updates, {sps:,.0f} SPS, {minutes:.1f} minutes left"
        print(f"{progress}, reward {batch['rewards'].mean():.3f}", flush=True)
        if num_evals and iteration * num_evals % args.num_updates < num_evals:  # evenly spaced, the last at the end
            log_evaluation(iteration)
        if iteration % args.checkpoint_every == 0:
            log.tensorboard.flush()
            data = {  # all that changes, as tensors, numbers and strings: loading it runs no code
                "model": model.state_dict(),
                "reference": reference.state_dict() if reference else None,
                "optimizer": optimizer.state_dict(),
                "queue": list(rollout_lag.queue),
                "rngs": [rng.bit_generator.state for rng in (problem_rng, minibatch_rng)],
                "generator": generator.get_state(),
                "state": state,
            }
            save(data, run_dir / "checkpoint.pt")
    log.tensorboard.close()
    save(model.state_dict(), run_dir / "model.pt")
    return model


# ------------------------------------------------------------------------------------------------------- files of a run


def check(args: Args) -> None:
    """Raises ValueError, exit code 2, with a line that says what to change. NaN lies in no range."""
    ranges = [
        ("num_updates num_prompts num_minibatches update_epochs n_embd pass_k checkpoint_every", 1, 1e15),
        ("num_generations num_terms", 2, 1000),
        ("max_new_tokens", 1, 1e5),
        ("num_digits", 1, 9),
        ("seed lag warmup_updates warm_start_steps eval_problems num_evals kl_coef", 0, 1e15),
        ("learning_rate max_grad_norm temperature delta rho_bar", 1e-30, 1e30),
    ]
    for names, low, high in ranges:
        for name in names.split():
            x = getattr(args, name)
            if not (x is None or low <= x <= high):
                raise ValueError(f"--{name.replace('_', '-')} must lie in {low:g} .. {high:g}, not {x}")
    if not (args.ops and set(args.ops) <= set("+-*") and len(set(args.ops)) == len(args.ops)):
        raise ValueError(f"--ops must be some of + - *, each once, not {args.ops}")
    if (args.max_new_tokens or math.inf) < make_task(args).solution_length:
        raise ValueError("--max-new-tokens must not be less than the longest worked solution has")
    if args.n_embd % 4:
        raise ValueError("--n-embd must be a multiple of the number of heads, 4")
    batch_size = args.num_prompts * args.num_generations
    if batch_size % args.num_minibatches:
        raise ValueError(f"--num-minibatches must cut the batch of {batch_size} in equal parts")


def check_task(task) -> None:
    """Raises ValueError where a task of one's own would train on nothing; looks at 100 of its problems."""
    if EOS in task.alphabet:
        raise ValueError(f"the alphabet of the task holds {EOS}, which ends a completion: choose another character")
    for problem in sample_problems(task, 100, np.random.default_rng(0), held_out=True):
        if unknown := set(problem.prompt + problem.solution) - set(task.alphabet):
            raise ValueError(f"{problem} has {sorted(unknown)}, not in the alphabet of the task")
        if len(problem.prompt) > task.prompt_length or len(problem.solution + EOS) > task.solution_length:
            raise ValueError(f"{problem} is longer than prompt_length or solution_length of the task says")
        reward = task.reward(problem.solution, problem)
        if not (isinstance(reward, int | float | np.number) and math.isfinite(reward)):
            raise ValueError(f"the reward of {problem} is {reward!r}, not a finite number")


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


def metrics(batch: dict, age: int, losses: dict, num_generations: int) -> dict[str, float]:
    """What is logged of an update: of its batch, and of its gradient steps."""
    mask = batch["mask"]
    groups = batch["rewards"].view(-1, num_generations)
    row = {name: x.mean() for name, x in losses.items()}
    row["losses/entropy"] = losses["losses/entropy"][0]
    row["losses/ratio_max"] = losses["losses/ratio_max"].max()
    row["losses/approx_kl_max"] = losses["losses/approx_kl_mean"].max()
    row["lag/tv_forward_max"] = losses["lag/tv_forward_mean"].max()
    row["lag/tv_forward_last"] = losses["lag/tv_forward_mean"][-1]
    row["lag/age_mean"] = row["lag/age_max"] = age
    row |= backward_lag(batch["learner_logprobs"][mask], batch["logprobs"][mask])
    row["charts/skipped_steps"] = losses["charts/skipped_steps"].sum()
    row["charts/reward"] = groups.mean()
    row["charts/zero_std_groups"] = (groups == groups[:, :1]).all(1).float().mean()
    row["charts/completion_length"] = mask.sum(1).float().mean()
    row["charts/truncated"] = batch["truncated"].float().mean()
    return {name: float(x) for name, x in row.items()}


def save(data: dict, path: Path) -> None:
    """The file appears whole or not at all, even if the process is killed meanwhile or the power fails."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with open(partial, "wb") as file:
        torch.save(data, file)
        os.fsync(file.fileno())
    os.replace(partial, path)


def restore(saved: dict, model, reference, optimizer, rollout_lag, rngs: list, generator) -> None:
    """Puts a checkpoint back, in place."""
    model.load_state_dict(saved["model"])
    if reference:
        reference.load_state_dict(saved["reference"])
    optimizer.load_state_dict(saved["optimizer"])
    for batch, version in saved["queue"]:
        rollout_lag.push(batch, version)
    for rng, rng_state in zip(rngs, saved["rngs"], strict=True):
        rng.bit_generator.state = rng_state
    generator.set_state(saved["generator"].cpu())


def main() -> None:
    try:  # are flags, task, device and folders good?
        if {"True", "False"} & set(sys.argv):
            raise ValueError("write --norm-adv or --no-norm-adv, without a value")
        args, saved = tyro.cli(Args, description=__doc__.splitlines()[0]), None
        if args.resume:
            if args != Args(resume=args.resume):
                raise ValueError("--resume takes no other flag")
            run_dir = path.parent if (path := args.resume.expanduser()).is_file() else path
            args = Args(**json.loads((run_dir / "config.json").read_text())["args"])
            saved = torch.load(run_dir / "checkpoint.pt", map_location=args.device, weights_only=True)
        check_task(make_task(args))
        args.warm_start_dir.mkdir(parents=True, exist_ok=True)
        torch.zeros(1, device=args.device)
        if not saved:
            default = Path(f"runs/{args.task}__{Path(__file__).stem}__lag{args.lag}__{args.seed}__{int(time.time())}")
            numbered = (Path(f"{default}-{i}") for i in range(2, 10_000))  # runs may start in the same second
            run_dir = args.run_dir or next(path for path in (default, *numbered) if not path.exists())
            run_dir.mkdir(parents=True)
            config = {"script": Path(__file__).stem, "args": asdict(args)}
            (run_dir / "config.json").write_text(json.dumps(config, indent=2, default=str))
    except Exception as error:
        print(f"{Path(__file__).name}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    print(f"files in {run_dir}")
    train(args, run_dir, saved)
    print(f"finished: {run_dir}")


if __name__ == "__main__":
    main()
