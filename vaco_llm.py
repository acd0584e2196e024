# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0"]
# ///
"""VACO (arXiv 2603.01365) for language models under policy lag, in one file. Base script: grpo_llm.py.

What differs from GRPO, in the order of the file:

1. Filter: `tv_filter` estimates, in every minibatch and for each completion, the total variation between pi_theta and
   mu; where it exceeds delta/2 it drops the tokens whose gradient would increase it. There is no clip.
2. Align: without a critic, advantages are those of mu's group; each token is weighted by pi_T/mu, up to rho bar.
3. The surrogate is that weight times pi_theta/pi_T, averaged over all valid tokens.

The full text of the paper leaves some choices open; a comment marks each where it is made.

Three policies: mu sampled (the learner some updates ago), pi_T is the learner when an update starts, pi_theta is being
updated. The lag is counted in updates; P prompts x G completions are a batch of B = P G.
"""

import copy
import csv
import errno
import hashlib
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
import threading
import time
import zipfile
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from decimal import Decimal
from importlib.metadata import distributions
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import tyro
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Args:
    task: Literal["arithmetic", "word-problems"] = "arithmetic"
    """problems to solve: chains of operations, or short texts of two or three steps"""
    num_terms: int = 6
    """terms of an arithmetic problem"""
    num_digits: int = 1
    """largest number of digits of a number in a problem"""
    ops: str = "+-"
    """operations of an arithmetic problem, some of + - *"""
    seed: int = 1
    """seed of every random stream of the training (the warm start has its own)"""
    num_updates: int = 100
    """updates in all, each on one batch"""
    num_prompts: int = 16
    """P, prompts per batch"""
    num_generations: int = 8
    """G, completions per prompt: the group whose mean is the baseline; the batch is B = P G"""
    temperature: float = 1.0
    """tau, divides the logits of the sampler and of the learner"""
    max_new_tokens: int | None = None
    """longest completion in tokens; None: as long as the longest worked solution"""
    num_minibatches: int = 1
    """minibatches per epoch, of M = B / num_minibatches completions each; more of them is more forward lag"""
    update_epochs: int = 1
    """passes over each batch; more of them is more forward lag"""
    learning_rate: float = 1e-4
    """step size of AdamW, constant after the warm-up"""
    warmup_updates: int = 10
    """updates over which the learning rate rises linearly to its value"""
    norm_adv: bool = True
    """divide advantages by the standard deviation of their group"""
    kl_coef: float = 0.0
    """weight of the KL of pi_theta to the warm start, per nat and token"""
    max_grad_norm: float = 1.0
    """L2 norm to which the gradient is clipped"""
    lag: int = 0
    """L, age in updates of the policy that sampled the batch; 0 is synchronous"""
    delta: float = 0.05
    """delta, threshold of the filter: it acts on a completion whose total variation exceeds delta/2"""
    rho_bar: float = 2.0
    """rho bar, largest weight pi_T/mu of a token"""
    realign: bool = True
    """weight each token by pi_T/mu; --no-realign: by 1"""
    tv_filter: bool = True
    """drop tokens by total variation; --no-tv-filter: keep all"""
    tv_center: Literal["behaviour", "learner"] = "behaviour"
    """whose distance from pi_theta the filter bounds: that of mu, or that of pi_T"""
    n_layer: int = 2
    """layers of the GPT"""
    n_head: int = 4
    """attention heads per layer"""
    n_embd: int = 96
    """width of the GPT"""
    warm_start_steps: int = 900
    """supervised steps on worked solutions before the training"""
    warm_start_learning_rate: float = 2e-3
    """step size of AdamW in the warm start, constant after 50 steps"""
    warm_start_dir: str = "runs/warm_start"
    """folder of the finished warm starts, kept by their settings: all seeds and both scripts start alike"""
    eval_problems: int = 384
    """held-out problems per evaluation of the current policy; 0: no evaluation"""
    pass_k: int = 4
    """k, completions sampled per held-out problem, for the sampled accuracy and pass@k"""
    num_evals: int = 5
    """evaluations, evenly spaced over the run, after one of the warm start; 0: none at all"""
    run_dir: Path | None = None
    """folder for the files of the run; None: runs/{task}__{exp_name}__{seed}__{time}"""
    checkpoint_every: int = 50
    """updates from one checkpoint to the next; 0: only when a signal stops the run"""
    resume: Path | None = None
    """folder of a run to go on with, as if it had never stopped; takes no other flag"""
    exp_name: str = "vaco_llm"
    """name of the experiment, part of the default folder"""
    device: str = "cpu"
    """torch device of the GPT: cpu, cuda or cuda:1"""
    track: bool = False
    """log to Weights & Biases as well (pip install wandb)"""

    @property
    def batch_size(self) -> int:
        return self.num_prompts * self.num_generations

    @property
    def minibatch_size(self) -> int:
        return self.batch_size // self.num_minibatches

    @property
    def completion_length(self) -> int:
        return self.max_new_tokens or make_task(self).solution_length

    def __post_init__(self):
        check(self)


# ----------------------------------------------------------------------------------------------------------- tasks

EOS = "$"  # ends every completion; no other character of a task


class Problem(NamedTuple):
    prompt: str
    solution: str  # worked, for the warm start
    answer: str


class Arithmetic:
    """Terms joined by operators, solved by the result of each operator in turn: `7+5-3=` -> `12;9`.

    A task of your own is a class with this __init__, these three attributes and these two methods.
    """

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


NAMES = ("ann", "ben", "cleo", "dan", "eva", "finn", "gina", "hugo", "ida", "jack", "kim", "leo")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pears", "pens", "shells", "stamps")
# a text, and its steps: a, b, c, d are numbers of the text, x is the step before and y the one before that
STORIES = (
    ("N has a T and buys b bags of c. how many T now?", ("b*c", "a+x")),
    ("N finds a T on monday and b on tuesday, then loses c. how many T are left?", ("a+b", "x-c")),
    ("a boxes hold b T each. N sells c T. how many are left?", ("a*b", "x-c")),
    ("N has a T, gets b, gives away c and finds d. how many T now?", ("a+b", "x-c", "x+d")),
    ("N fills a bags with b T each, adds c T and drops d. how many T now?", ("a*b", "x+c", "x-d")),
    ("N packs a crates of b T and c crates of d. how many T in all?", ("a*b", "c*d", "y+x")),
)


class WordProblems:
    """Grade-school problems from templates: `ann has 3 pens and buys 2 bags of 4. how many pens now?`, solved by
    `2*4=8`, `3+8=11`, `#### 11`, a line each."""

    def __init__(self, args: Args):
        self.num_digits = args.num_digits
        self.alphabet = "abcdefghijklmnopqrstuvwxyz0123456789+-*=#.,? \n"
        longest = max(len(text) for text, _ in STORIES) + 2 * max(map(len, THINGS)) + max(map(len, NAMES))
        self.prompt_length = longest + 4 * self.num_digits
        number = 2 * self.num_digits + 1
        self.solution_length = 3 * (3 * number + 3) + len("#### ") + number + 1  # at most, with the EOS

    def sample(self, rng: np.random.Generator) -> Problem:
        text, steps = STORIES[rng.integers(len(STORIES))]
        words = {"N": NAMES[rng.integers(len(NAMES))], "T": THINGS[rng.integers(len(THINGS))]}
        while True:
            numbers = dict(zip("abcd", rng.integers(2, 10**self.num_digits, 4), strict=True))
            results, lines = [], []
            for left, op, right in steps:
                known = numbers | dict(zip("xy", reversed(results)))  # noqa: B905 (the first step has no x, the second no y)
                x, y = int(known[left]), int(known[right])
                results.append({"+": x + y, "-": x - y, "*": x * y}[op])
                lines.append(f"{x}{op}{y}={results[-1]}")
            if min(results) >= 0:  # nobody can lose more than there is
                break
        fill = words | {name: str(number) for name, number in numbers.items()}
        prompt = re.sub(r"\b[NTabcd]\b", lambda match: fill[match.group()], text)
        return Problem(prompt, "\n".join([*lines, f"#### {results[-1]}"]), str(results[-1]))

    def reward(self, completion: str, problem: Problem) -> float:
        return answer_reward(completion, problem.answer)


def make_task(args: Args):
    return {"arithmetic": Arithmetic, "word-problems": WordProblems}[args.task](args)


def is_held_out(prompt: str) -> bool:
    """One prompt in eight is for evaluation only. Not Python's hash, which changes from process to process."""
    return hashlib.sha256(prompt.encode()).digest()[0] < 32


def draw_problems(task, count: int, rng: np.random.Generator, held_out: bool) -> list[Problem]:
    problems = []
    for _ in range(1000 * count):
        problem = task.sample(rng)
        if is_held_out(problem.prompt) == held_out:
            problems.append(problem)
            if len(problems) == count:
                return problems
    raise Refused("the task has too few problems to hold one in eight out; make it larger")


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


# -------------------------------------------------------------------------------------------------------- networks


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
    return GPT(len(tokenizer.alphabet), context_length, args.n_layer, args.n_head, args.n_embd).to(device)


def warm_start(args: Args, task, tokenizer: CharTokenizer, device: torch.device) -> GPT:
    """A GPT that has seen worked solutions, from the folder of warm starts or made now.

    Its random streams are its own, so that one warm start serves every seed. Raises Refused for a file that cannot be
    used.
    """
    torch.manual_seed(0)
    model = new_model(args, task, tokenizer, device)
    names = ("task", "num_terms", "num_digits", "ops", "n_layer", "n_head", "n_embd", "warm_start_steps")
    settings = [args.warm_start_learning_rate, *(getattr(args, name) for name in names)]
    examples = draw_problems(task, 8, np.random.default_rng(1), held_out=False)  # an edited task has another warm start
    settings += [model.context_length, torch.__version__, device.type, tokenizer.alphabet, examples]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    path = Path(args.warm_start_dir) / f"{args.task}-{key}.pt"
    partial = path.with_suffix(f".{os.getpid()}.partial")  # whole or not at all, also where two runs make it at once
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            model.load_state_dict(read_file(path, device))
            return model
        partial.touch()
    except Exception as error:
        raise Refused(f"--warm-start-dir: {path} cannot be used; delete it or name another folder") from error
    supervise(model, args, task, tokenizer)
    if not all(x.isfinite().all() for x in model.parameters()):
        partial.unlink()
        raise Refused("--warm-start-learning-rate: the warm start diverged; make it smaller")
    try:
        write_file(partial, model.state_dict())
        os.replace(partial, path)
    except OSError as error:
        raise Refused(f"--warm-start-dir: {path} cannot be written ({error.strerror}); name another folder") from error
    return model


def supervise(model: GPT, args: Args, task, tokenizer: CharTokenizer) -> None:
    """Trains the GPT to continue prompts with their worked solutions, by cross-entropy on the solutions' tokens."""
    rng, start, steps = np.random.default_rng(0), time.perf_counter(), args.warm_start_steps
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = args.warm_start_learning_rate * min(1, step / 50)
        problems = draw_problems(task, 64, rng, held_out=False)
        prompts, padding = tokenizer.encode([problem.prompt for problem in problems], left=True)
        solutions, _ = tokenizer.encode([problem.solution + EOS for problem in problems])
        mask, _ = completion_mask(solutions, [tokenizer.eos_id])
        batch = {"prompts": prompts, "padding": padding, "completions": solutions, "mask": mask}
        batch |= {"group": torch.arange(len(problems))}
        batch = {name: x.to(model.wte.weight.device) for name, x in batch.items()}
        loss = -masked_mean(score(model, batch, temperature=1.0)[0], batch["mask"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step * 10 // steps > (step - 1) * 10 // steps:
            seconds = time.perf_counter() - start
            print(f"warm start {step}/{steps} steps  loss {loss.item():.3f}  {seconds:.0f} s", flush=True)


# --------------------------------------------------------------------------------------------------- lag simulator


class RolloutLag:
    """A queue of batches, first in, first out, as between samplers and a learner that runs behind by `lag` updates.

    `lag` + 1 batches are sampled before the first update, so the k-th batch trained on (from 0) has age min(k, lag).
    """

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


# ----------------------------------------------------------------------------------------------------------- maths


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


outward_filter = tv_filter  # `vaco_loss` has an argument of that name


def vaco_loss(
    newlogprobs,
    learner_logprobs,
    behaviour_logprobs,
    advantages,
    mask,
    delta,
    rho_bar,
    *,
    realign=True,
    tv_filter=True,
    center="behaviour",
):
    """VACO's filtered surrogate (arXiv 2603.01365). Returns (loss, metrics), metrics of scalar tensors.

    - sum over kept tokens of min(pi_T/mu, rho_bar) (pi_theta/pi_T) A, over the number of *valid* tokens; the first
    factor has no gradient. Log-probabilities and mask (B, L), advantages (B,).
    """
    assert advantages.shape == mask.shape[:1]
    ratio, counts = masked_ratio(newlogprobs, learner_logprobs, mask)  # pi_theta/pi_T
    weight = (learner_logprobs - behaviour_logprobs).exp().clamp(max=rho_bar).detach() if realign else 1.0
    center_logprobs = {"behaviour": behaviour_logprobs, "learner": learner_logprobs}[center]
    keep, tv = outward_filter(newlogprobs, learner_logprobs, center_logprobs, advantages, mask, delta)
    keep = keep & counts if tv_filter else counts
    loss = masked_mean(-torch.where(keep, weight * ratio * advantages.unsqueeze(1), 0.0), mask)
    triggered = (tv > delta / 2).float().mean() if tv_filter else torch.zeros_like(loss)
    filtered = masked_mean((~keep).float(), mask)
    return loss, {"clipfrac": torch.zeros_like(loss), "filtered_fraction": filtered, "filter_triggered": triggered}


def policy_loss(newlogprobs, learner_logprobs, behaviour_logprobs, advantages, mask, args):
    logprobs = (newlogprobs, learner_logprobs, behaviour_logprobs)
    switches = {"realign": args.realign, "tv_filter": args.tv_filter, "center": args.tv_center}
    return vaco_loss(*logprobs, advantages, mask, args.delta, args.rho_bar, **switches)


@torch.no_grad()
def backward_lag(learner_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor) -> dict[str, float]:
    """Distance of pi_T from mu over a batch (B,), with w = pi_T/mu: total variation 1/2 mean |w - 1|, and effective
    sample size (sum w)^2 / (B sum w^2)."""
    log_w = (learner_logprobs - behaviour_logprobs).double()
    log_ess = 2 * log_w.logsumexp(0) - (2 * log_w).logsumexp(0) - math.log(len(log_w))  # w^2 may overflow
    return {"lag/tv_backward": float(0.5 * (log_w.exp() - 1).abs().mean()), "lag/ess": float(log_ess.exp())}


# --------------------------------------------------------------------------------------------------------- rollout


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


def complete(model: GPT, task, tokenizer: CharTokenizer, problems: list[Problem], G: int, args: Args, generator=None):
    """Completes P problems G times each and rewards the B = P G completions. Returns (batch, texts).

    batch holds prompts (P, L_prompt), the number of padding tokens at their left (P,), of each completion the prompt
    it continues, group (B,), the completions with their mask and behaviour logprobs (B, L), truncated and rewards (B,).
    """
    device = model.wte.weight.device
    prompts, padding = (x.to(device) for x in tokenizer.encode([p.prompt for p in problems], left=True))
    group = torch.arange(len(problems), device=device).repeat_interleave(G)
    settings = (args.completion_length, args.temperature, tokenizer.eos_id, generator)
    completions, logprobs = sample(model, prompts, padding, group, *settings)
    require_finite("logprobs", logprobs)
    mask, truncated = completion_mask(completions, [tokenizer.eos_id])
    texts, repeated = tokenizer.decode(completions), [problem for problem in problems for _ in range(G)]
    # what has no end has no answer either, whatever its last number happens to be
    rows = zip(texts, repeated, truncated.tolist(), strict=True)
    rewards = [0.0 if cut else task.reward(text, problem) for text, problem, cut in rows]
    batch = {"prompts": prompts, "padding": padding, "group": group, "completions": completions, "mask": mask}
    rewards = torch.tensor(rewards, dtype=torch.float32, device=device)
    return batch | {"logprobs": logprobs, "truncated": truncated, "rewards": rewards}, texts


def rollout(model: GPT, task, tokenizer: CharTokenizer, args: Args, rng: np.random.Generator, generator) -> dict:
    """G completions each of P new problems, as in `complete`, with their advantages (B,) and the seconds it took."""
    start = time.perf_counter()
    problems = draw_problems(task, args.num_prompts, rng, held_out=False)
    batch, _ = complete(model, task, tokenizer, problems, args.num_generations, args, generator)
    rewards = batch["rewards"].view(args.num_prompts, args.num_generations)
    batch["advantages"] = group_advantages(rewards, args.norm_adv).flatten()
    return batch | {"seconds": time.perf_counter() - start}


def score(model: GPT, batch: dict, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (B, L) of a batch's completions, and the logits (B, L, V) that they come from."""
    prompts, padding, group, completions = (batch[name] for name in ("prompts", "padding", "group", "completions"))
    length, inputs = prompts.shape[1], completions[:, :-1]  # the last token predicts nothing that is here
    if len(group) > len(prompts):
        first, padding, cache = read_prompts(model, prompts, padding, group, inputs.shape[1])
        logits = torch.cat((first, model(inputs, padding, cache, length)), 1)
    else:  # one completion per prompt, or a minibatch of few: two passes take longer than one
        logits = model(torch.cat((prompts[group], inputs), 1), padding[group])[:, length - 1 :]
    return token_logprobs(logits, completions, temperature), logits


# ---------------------------------------------------------------------------------------------------------- update


def gradient_step(model: GPT, optimizer: torch.optim.Optimizer, mb: dict, args: Args, skipped: bool = False):
    """One step on a minibatch of M completions, or only its metrics. Returns (newlogprobs (M, L), scalar tensors)."""
    mask, behaviour = mb["mask"], mb["logprobs"]
    newlogprobs, logits = score(model, mb, args.temperature)  # (M, L), (M, L, V)
    learner = mb.get("learner_logprobs", newlogprobs.detach())
    pg_loss, metrics = policy_loss(newlogprobs, learner, behaviour, mb["advantages"], mask, args)
    loss, grad_norm = pg_loss, torch.zeros_like(pg_loss)
    if args.kl_coef:
        metrics["kl_warm_start"] = kl_penalty(newlogprobs, behaviour, mb["reference_logprobs"], mask)
        loss = pg_loss + args.kl_coef * metrics["kl_warm_start"]
    if not skipped:
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()

    with torch.no_grad():
        newlogprobs, all_logprobs = newlogprobs.detach(), (logits / args.temperature).log_softmax(-1)
        ratio = torch.where(mask, newlogprobs - behaviour, 0.0).exp()
        log_ratio = torch.where(mask, newlogprobs - learner, 0.0)
        metrics |= {"entropy": masked_mean(-(all_logprobs.exp() * all_logprobs).sum(-1), mask)}
        metrics |= {"approx_kl": masked_mean(log_ratio.exp() - 1 - log_ratio, mask)}
        metrics |= {"ratio_mean": masked_mean(ratio, mask), "ratio_max": torch.where(mask, ratio, 0.0).max()}
        metrics |= {"tv_forward": total_variation(newlogprobs, learner, mask).mean()}
        metrics |= {"tv_behaviour": total_variation(newlogprobs, behaviour, mask).mean()}
    metrics |= {"policy_loss": pg_loss, "grad_norm": grad_norm, "skipped": torch.full_like(pg_loss, skipped)}
    return newlogprobs, {name: x.detach() for name, x in metrics.items()}


def update(model: GPT, optimizer: torch.optim.Optimizer, batch: dict, args: Args, rng: np.random.Generator) -> dict:
    """Epochs x minibatches of gradient steps on a batch, which gets learner_logprobs, those of pi_T, (B, L).

    Returns {name: (gradient steps,)}. Without any advantage a step is skipped: Adam's momentum, and the KL, would move
    the weights all the same. Raises FloatingPointError where a loss or gradient is not finite. A GPU is waited for
    before and after all steps, not between them.
    """
    if args.num_minibatches * args.update_epochs > 1:  # else the only step's own forward pass is that of pi_T
        with torch.no_grad():
            batch["learner_logprobs"], _ = score(model, batch, args.temperature)
    steps, signal = [], (batch["advantages"] != 0) & batch["mask"].any(1)
    inds = torch.as_tensor(np.concatenate([rng.permutation(args.batch_size) for _ in range(args.update_epochs)]))
    skipped = ~signal.cpu()[inds].view(-1, args.minibatch_size).any(1)
    inds = inds.to(signal.device).view(-1, args.minibatch_size)
    for mb_inds, skip in zip(inds, skipped.tolist(), strict=True):
        mb = {name: x if name in ("prompts", "padding") else x[mb_inds] for name, x in batch.items()}
        newlogprobs, metrics = gradient_step(model, optimizer, mb, args, skip)
        steps.append(metrics)
    if len(steps) == 1:
        batch["learner_logprobs"] = newlogprobs[inds[0].argsort()]  # back in the batch's order
    metrics = {name: torch.stack([step[name] for step in steps]).cpu() for name in steps[0]}
    for name in ("policy_loss", "kl_warm_start", "grad_norm"):
        require_finite(name, metrics.get(name, torch.zeros(1)))
    require_finite("learner_logprobs", batch["learner_logprobs"])
    return metrics


def require_finite(name: str, x: torch.Tensor, columns: str | None = None) -> None:
    """Raises FloatingPointError; with `columns`, what x (T, N, ...) has N of, it says in which."""
    if not x.isfinite().all():
        where = f" in {columns} {int((~x.isfinite()).nonzero()[0, 1])}" if columns else ""
        raise FloatingPointError(f"{name} not finite{where}")


# ------------------------------------------------------------------------------------------------------ evaluation

TRAIN_STREAMS = 3  # random streams of `train`: problems, tokens, minibatches; evaluation takes the next one


def token_generator(stream: np.random.SeedSequence, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(int(stream.generate_state(1)[0]))


def evaluate(model: GPT, task, tokenizer: CharTokenizer, args: Args) -> tuple[dict, list]:
    """Solves held-out problems with the current policy. One seed always gives the same problems.

    Returns ({name: float}, examples): the accuracy and its standard deviation over problems, both greedy; the accuracy
    of k sampled completions per problem and the share of problems that one of the k solves; and of the sampled ones
    length, truncated share and a few examples (prompt, completion, reference, reward).
    """
    problem_stream, token_stream = np.random.SeedSequence(args.seed, spawn_key=(TRAIN_STREAMS,)).spawn(2)
    rng, generator = np.random.default_rng(problem_stream), token_generator(token_stream, model.wte.weight.device)
    problems = draw_problems(task, args.eval_problems, rng, held_out=True)
    greedy, _ = complete(model, task, tokenizer, problems, 1, args)
    sampled, texts = complete(model, task, tokenizer, problems, args.pass_k, args, generator)
    solved = sampled["rewards"].view(-1, args.pass_k)
    scores = {"greedy_accuracy": greedy["rewards"].mean(), "greedy_std": greedy["rewards"].std(correction=0)}
    scores |= {"sampled_accuracy": solved.mean(), "pass_at_k": solved.amax(1).mean()}
    scores |= {
        "completion_length": sampled["mask"].sum(1).float().mean(),
        "truncated": sampled["truncated"].float().mean(),
    }
    first_of_each = zip(problems, texts[:: args.pass_k], solved[:, 0].tolist(), strict=True)
    examples = [(problem.prompt, text, problem.answer, reward) for problem, text, reward in first_of_each]
    return {name: float(x) for name, x in scores.items()}, examples[:4]


# ----------------------------------------------------------------------------------------------------------- train


def train(args: Args, signals: list | tuple = ()) -> dict:
    """Runs a training and returns what `result.json` holds. Raises Refused where it cannot start as asked, and
    KeyboardInterrupt, with a checkpoint, after the update in which something was put into `signals`."""
    torch.set_num_threads(1)  # the GPT is too small to gain from more, and one is reproducible
    args, saved = load_checkpoint(args.resume) if args.resume else (args, None)
    device = open_device(args.device)
    streams = np.random.SeedSequence(args.seed).spawn(TRAIN_STREAMS)  # one per purpose: no draw shifts another's
    problem_rng, generator = np.random.default_rng(streams[0]), token_generator(streams[1], device)
    minibatch_rng = np.random.default_rng(streams[2])
    if not saved:
        refuse_used(args.run_dir)  # now, and not after the warm start
    task = make_task(args)
    draw_problems(task, 1, np.random.default_rng(0), held_out=True)  # Refused now rather than at the first evaluation
    tokenizer = CharTokenizer(task.alphabet)
    model = (new_model if saved else warm_start)(args, task, tokenizer, device)
    reference = copy.deepcopy(model)  # what the KL is to
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    rollout_lag = RolloutLag(args.lag)
    changing = (model, reference, optimizer, rollout_lag, [problem_rng, minibatch_rng], generator)
    if saved:
        restore(saved, *changing)
    files = RunFiles(args, saved)
    iteration = first = saved["iteration"] + 1 if saved else 1
    try:
        if not saved:  # from here on the run can be resumed
            files.evaluate(model, task, tokenizer, 0)
            files.checkpoint(0, checkpoint(*changing))
        for iteration in range(first, args.num_updates + 1):
            optimizer.param_groups[0]["lr"] = args.learning_rate * min(1, iteration / max(1, args.warmup_updates))

            # sample, and train on what has waited longest; the last batches sampled are those of the last update
            while not rollout_lag.full() and iteration + len(rollout_lag.queue) <= args.num_updates:
                batch = rollout(model, task, tokenizer, args, problem_rng, generator)
                rollout_lag.push(batch, version=iteration - 1)
            batch, age = rollout_lag.pop(version=iteration - 1)
            start, sampling_seconds = time.perf_counter(), batch.pop("seconds")

            if args.kl_coef:
                with torch.no_grad():
                    batch["reference_logprobs"], _ = score(reference, batch, args.temperature)
            steps = update(model, optimizer, batch, args, minibatch_rng)
            require_finite("norm of the weights", nn.utils.get_total_norm(model.parameters()))

            seconds = {"sampling": sampling_seconds, "training": time.perf_counter() - start}
            files.log(iteration, optimizer.param_groups[0]["lr"], batch, age, steps, seconds)
            if iteration * args.num_evals % args.num_updates < args.num_evals:  # evenly spaced, the last one at the end
                files.evaluate(model, task, tokenizer, iteration)
            due = args.checkpoint_every and iteration % args.checkpoint_every == 0
            if (due or signals) and iteration < args.num_updates:
                files.checkpoint(iteration, checkpoint(*changing))
                if signals:
                    raise KeyboardInterrupt(f"stopped after update {iteration}; go on with --resume {files.dir}")
        write_file(files.dir / "model.pt", model.state_dict())
        return files.close("finished", iteration)
    except FloatingPointError as error:
        return files.close("failed", max(0, iteration - 1), error=f"update {iteration}: {error}")
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return files.abandon(f"update {iteration}: {error.strerror}")
        # of a task of your own, say: its author needs the traceback
        files.close("failed", max(0, iteration - 1), error=f"update {iteration}: {error!r}")
        raise


def checkpoint(model, reference, optimizer, rollout_lag, rngs: list, generator) -> dict:
    """All that a training changes, as tensors, numbers and strings: loading such a file cannot run code."""
    return {
        "model": model.state_dict(),
        "reference": reference.state_dict(),
        "optimizer": optimizer.state_dict(),
        "queue": list(rollout_lag.queue),
        "rngs": [rng.bit_generator.state for rng in rngs],
        "generator": generator.get_state(),
    }


def restore(saved: dict, model, reference, optimizer, rollout_lag, rngs: list, generator) -> None:
    """The reverse of `checkpoint`, in place."""
    device = generator.device
    model.load_state_dict(saved["model"])
    reference.load_state_dict(saved["reference"])
    optimizer.load_state_dict(saved["optimizer"])
    for batch, version in saved["queue"]:
        batch = {name: x.to(device) if torch.is_tensor(x) else x for name, x in batch.items()}
        rollout_lag.push(batch, version)
    for rng, rng_state in zip(rngs, saved["rngs"], strict=True):
        rng.bit_generator.state = rng_state
    generator.set_state(saved["generator"])


# ------------------------------------------------------------------------------------------------- files of a run


class Refused(ValueError):
    """The run cannot start as asked; the message says what to change. Exit code 2."""


def check(args: Args) -> None:
    """Raises ValueError with a line that says what to change. Every test is positive, so that NaN fails it."""
    counts = "num_updates num_prompts num_minibatches update_epochs n_layer n_head n_embd pass_k"
    if args.resume:
        changed = [field.name for field in fields(args) if getattr(args, field.name) != field.default]
        if changed != ["resume"]:
            raise ValueError(
                f"--resume takes no other flag; leave out {', '.join(x for x in changed if x != 'resume')}"
            )
    rules = [
        (counts, lambda x: x >= 1, "be 1 or more"),
        ("num_terms", lambda x: 2 <= x <= 100, "lie in 2 .. 100"),
        ("num_generations", lambda x: x >= 2, "be 2 or more"),
        ("max_new_tokens", lambda x: x is None or 1 <= x <= 10**5, "lie in 1 .. 100000"),
        ("num_digits", lambda x: 1 <= x <= 9, "lie in 1 .. 9"),
        ("ops", lambda x: x and set(x) <= set("+-*") and len(set(x)) == len(x), "be some of + - *, each once"),
        (
            "lag warmup_updates warm_start_steps eval_problems num_evals checkpoint_every",
            lambda x: x >= 0,
            "be 0 or more",
        ),
        ("delta rho_bar", lambda x: 0 < x < 1e38, "be positive and finite in float32"),
        ("temperature", lambda x: 1e-30 <= x < 1e30, "lie in 1e-30 .. 1e30"),
        ("learning_rate warm_start_learning_rate max_grad_norm", lambda x: 0 < x < math.inf, "be positive and finite"),
        ("kl_coef", lambda x: 0 <= x < 1e30, "lie in 0 .. 1e30"),
        ("seed", lambda x: 0 <= x < 2**32, "lie in 0 .. 4294967295"),
    ]
    for names, allowed, must in rules:
        for name in names.split():
            if not allowed(getattr(args, name)):
                raise ValueError(f"--{name.replace('_', '-')} must {must}, not {getattr(args, name)}")
    needed = make_task(args).solution_length
    if args.max_new_tokens is not None and args.max_new_tokens < needed:
        raise ValueError(f"--max-new-tokens must be {needed} or more: the longest worked solution has as many")
    if args.n_embd % args.n_head:
        raise ValueError(f"--n-embd must be a multiple of --n-head, {args.n_head}")
    if args.batch_size % args.num_minibatches:
        divisors = [str(n) for n in range(1, min(args.batch_size, 4096) + 1) if args.batch_size % n == 0]
        raise ValueError(
            f"--num-minibatches must cut the batch of {args.batch_size} in equal parts: {', '.join(divisors)}"
        )


def refuse_used(folder: Path | None) -> None:
    if folder and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"--run-dir {folder} is not empty; name a new folder")


class RunFiles:
    """The folder of a run: config.json, evals.csv, samples.jsonl, metrics.csv, TensorBoard events, checkpoint.pt,
    model.pt and, last, result.json. Raises Refused where the folder cannot be used."""

    def __init__(self, args: Args, saved: dict | None):
        self.args = args
        name = re.sub(r"[^\w.-]", "-", f"{args.task}__{args.exp_name}__{args.seed}__{int(time.time())}")
        resumed, saved = saved is not None, saved["files"] if saved else {"name": name}
        self.name, self.sizes = saved["name"], saved.get("sizes", {})
        self.dir = args.run_dir or Path("runs") / name
        from torch.utils.tensorboard import SummaryWriter  # slow to import, so before the folder exists

        try:
            if not resumed:
                refuse_used(self.dir)
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
        names = ("greedy_accuracy", "sampled_accuracy", "pass_at_k", "completion_length", "truncated")
        self.evals = self.open_csv("evals.csv", ["update", *names])
        self.samples = self.open_table("samples.jsonl")
        self.metrics = None  # the first row's names are its header
        self.rewards = saved.get("rewards", [])  # mean of each update's batch
        self.last_eval = saved.get("last_eval", {})
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
        files |= {"purge_step": iteration + 1, "last_eval": self.last_eval, "rewards": self.rewards}
        args = {name: str(x) if isinstance(x, Path) else x for name, x in asdict(self.args).items()}
        data = {"script": Path(__file__).stem, "args": args, "iteration": iteration, "files": files} | training
        path = self.dir / "checkpoint.pt"
        write_file(path, data, keep=self.dir / "checkpoint_previous.pt")

    def seconds(self) -> float:
        """Seconds of training, without evaluation."""
        return time.perf_counter() - self.start - self.eval_seconds

    def sps(self, global_step: int) -> float:
        """Completions trained on per second."""
        return global_step * self.args.batch_size / self.seconds()

    def log(self, global_step: int, lr: float, batch: dict, age: int, steps: dict, seconds: dict) -> None:
        """One row of metrics.csv, TensorBoard and W&B from one dict. A step is an update."""
        sps, mask = self.sps(global_step), batch["mask"]
        groups = batch["rewards"].view(self.args.num_prompts, self.args.num_generations)
        self.rewards.append(float(groups.mean()))
        row = {"charts/learning_rate": lr, "charts/SPS": sps, "charts/seconds": self.seconds()}
        row |= {"charts/reward": self.rewards[-1]}
        row |= {"charts/zero_std_groups": (groups == groups[:, :1]).all(1).float().mean()}
        row |= {"charts/completion_length": mask.sum(1).float().mean()}
        row |= {"charts/truncated": batch["truncated"].float().mean(), "charts/skipped_steps": steps["skipped"].sum()}
        row |= {"charts/tokens_per_second": mask.sum() / seconds["sampling"]}
        row |= {f"charts/{name}_seconds": x for name, x in seconds.items()}
        row |= {"losses/policy_loss": steps["policy_loss"].mean(), "losses/entropy": steps["entropy"][0]}
        row |= {"losses/approx_kl_mean": steps["approx_kl"].mean(), "losses/approx_kl_max": steps["approx_kl"].max()}
        names = ("clipfrac", "grad_norm", "kl_warm_start", "ratio_mean")
        row |= {f"losses/{name}": steps[name].mean() for name in names if name in steps}
        row |= {"losses/ratio_max": steps["ratio_max"].max(), "lag/age_mean": age, "lag/age_max": age}
        row |= backward_lag(batch["learner_logprobs"][mask], batch["logprobs"][mask])
        row |= {"lag/tv_forward_mean": steps["tv_forward"].mean(), "lag/tv_forward_max": steps["tv_forward"].max()}
        row |= {"lag/tv_forward_last": steps["tv_forward"][-1], "lag/tv_behaviour_mean": steps["tv_behaviour"].mean()}
        row |= {f"lag/{name}": steps[name].mean() for name in ("filtered_fraction", "filter_triggered")}
        row = {name: float(x) for name, x in row.items()}
        self.metrics = self.metrics or self.open_csv("metrics.csv", ["global_step", *row])
        self.metrics.writerow([global_step, *row.values()])
        self.send(row, global_step)
        self.progress(global_step, sps)

    def send(self, row: dict, global_step: int) -> None:
        for name, x in row.items():
            self.tensorboard.add_scalar(name, x, global_step)
        if self.wandb:
            self.wandb.log(row | {"global_step": global_step})

    def progress(self, global_step: int, sps: float) -> None:
        """One line, rewritten on a terminal; elsewhere a new one at every tenth of the run."""
        total = self.args.num_updates
        left = (time.perf_counter() - self.start) / global_step * (total - global_step)
        line = f"{global_step}/{total} updates  {sps:,.0f} SPS  {timedelta(seconds=round(left))} left"
        line += f"  reward {np.mean(self.rewards[-10:]):.3f} (last {len(self.rewards[-10:])} updates)"
        if self.last_eval:
            line += "  held-out {greedy_accuracy:.3f} greedy, {sampled_accuracy:.3f} sampled".format(**self.last_eval)
        if sys.stdout.isatty():
            print(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        elif global_step * 10 // total > (global_step - 1) * 10 // total:
            print(line, flush=True)

    def evaluate(self, model: GPT, task, tokenizer: CharTokenizer, global_step: int) -> None:
        if 0 in (self.args.eval_problems, self.args.num_evals):
            return
        start = time.perf_counter()
        scores, examples = evaluate(model, task, tokenizer, self.args)
        require_finite("evaluation scores", torch.tensor([*scores.values()]))
        self.last_eval = scores
        row = {name: x for name, x in self.last_eval.items() if name != "greedy_std"}
        self.evals.writerow([global_step, *row.values()])
        self.send({f"eval/{name}": x for name, x in row.items()}, global_step)
        lines = [dict(zip(("prompt", "completion", "reference", "reward"), x, strict=True)) for x in examples]
        lines = [json.dumps({"update": global_step} | line) for line in lines]
        self.samples.writelines(f"{line}\n" for line in lines)
        self.tensorboard.add_text("eval/samples", "\n".join(f"    {line}" for line in lines), global_step)
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
        late = self.rewards[int(0.9 * len(self.rewards)) :]
        result = {"status": status, "seed": self.args.seed, "global_step": global_step}
        result |= {"train_return": float(np.mean(late)) if late else None}
        result |= {"eval_return": self.last_eval.get("greedy_accuracy"), "eval_std": self.last_eval.get("greedy_std")}
        result |= {name: self.last_eval.get(name) for name in ("greedy_accuracy", "sampled_accuracy", "pass_at_k")}
        result |= {"sps": self.sps(global_step), "peak_rss_mb": peak_rss_mb()} | more
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
