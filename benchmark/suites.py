"""What is run, as data: a new suite is a copy of an entry of SUITES, a new algorithm a script and the flags it needs.
A variant of an algorithm, one with other epochs say, is an algorithm with a name of its own.

A script takes --env-id (or what `task_flag` names), --lag, --seed, --run-dir and the flags of its suite, and writes
config.json, metrics.csv, evals.csv and, last, model.pt into its run directory; it need not know of this package.
"""

from dataclasses import dataclass, replace


class Refused(Exception):
    """What was asked for cannot be done; the message says why in one line (exit code 2)."""


@dataclass(frozen=True)
class Suite:
    description: str
    algorithms: dict[str, tuple[str, dict]]  # name in tables and legends -> (script, flags of its own)
    tasks: tuple[str, ...]  # environment ids or the like, passed as --env-id or as `task_flag` says
    lags: tuple[int, ...]
    seeds: tuple[int, ...]
    settings: dict  # flags common to all runs, without the dashes: {"num-envs": 16}; True gives --flag, False --no-flag
    task_flag: str = "env-id"
    step_name: str = "environment steps"  # what the first column of evals.csv counts
    score_name: str = "evaluation return"  # what its second column measures
    decimals: int = 1  # of a score in tables
    pairs: tuple[tuple[str, str], ...] = ()  # (x, y): the report shows x - y; empty: the last less each of the others
    options: str = ""  # how --set changed the suite of this name

    @property
    def comparisons(self):
        *others, last = self.algorithms
        return self.pairs or tuple((last, other) for other in others)


def short(x):
    """.5 -> ".5", False -> "false", as the names of algorithms have it"""
    return str(x).removeprefix("0") if isinstance(x, float) and 0 < x < 1 else str(x).lower()


def variants(name, script, flag, values):
    """{"VACO delta .1": (script, {"delta": .1}), ...}"""
    return {f"{name} {short(x)}": (script, {flag: x}) for x in values}


PPO, VACO = ("ppo_continuous.py", {}), ("vaco_continuous.py", {})

# The ten MuJoCo tasks that are usual in papers, those that results are most often quoted of first
MUJOCO = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5", "HumanoidStandup-v5", "Swimmer-v5")
MUJOCO += ("Reacher-v5", "InvertedDoublePendulum-v5", "InvertedPendulum-v5")

# Minibatches of 256 with a larger step: 80 gradient steps per batch of 2048.
CHEAP = {"num-envs": 16, "num-steps": 128, "num-minibatches": 8, "update-epochs": 10, "learning-rate": 1e-3}
# CleanRL's minibatch of 64, 10 epochs and learning rate for MuJoCo, 16 environments instead of one: 320 steps.
CLEANRL = CHEAP | {"num-minibatches": 32, "learning-rate": 3e-4}
EVALS = {"num-evals": 10, "eval-episodes": 10}

HALFCHEETAH = Suite(
    description="how much of PPO's loss under lag is its clip: PPO with clip .2 and .5 beside VACO",
    # clip .2 holds PPO back under lag: the fair baseline is wider
    algorithms={"PPO": PPO, "PPO clip .5": ("ppo_continuous.py", {"clip-coef": 0.5}), "VACO": VACO},
    tasks=("HalfCheetah-v5",),
    lags=(0, 15),
    seeds=(1, 2, 3, 4, 5),
    settings=CHEAP | {"total-timesteps": 300_000} | EVALS,
)
TWO_TASKS = replace(HALFCHEETAH, tasks=("HalfCheetah-v5", "Hopper-v5"))
QUICK = replace(
    HALFCHEETAH,
    description="PPO and VACO without lag and under a lag at which PPO stalls, in minutes on two cores",
    algorithms={"PPO": PPO, "VACO": VACO},
    seeds=(1, 2, 3),
    settings=CHEAP | {"total-timesteps": 150_000, "num-evals": 10, "eval-episodes": 5},
)
# A GPT of 230,000 parameters on arithmetic: 100 updates of 16 prompts x 8 completions.
LLM = Suite(
    description="the same with five seeds, each algorithm at two learning rates",
    algorithms={
        "GRPO 1e-4": ("grpo_llm.py", {"learning-rate": 1e-4}),
        "GRPO 3e-4": ("grpo_llm.py", {"learning-rate": 3e-4}),
        "VACO 3e-4": ("vaco_llm.py", {"learning-rate": 3e-4}),
        "VACO 1e-4": ("vaco_llm.py", {"learning-rate": 1e-4}),
    },
    tasks=("arithmetic",),
    lags=(0, 16),
    seeds=(1, 2, 3, 4, 5),
    settings={"num-updates": 100, "num-prompts": 16, "num-generations": 8, "num-evals": 5},
    task_flag="task",
    step_name="updates",
    score_name="greedy accuracy",
    decimals=3,
    pairs=(("VACO 1e-4", "GRPO 1e-4"), ("VACO 3e-4", "GRPO 3e-4")),
)
EPOCHS, DELTAS = (1, 5, 10, 20, 40), (0.05, 0.1, 0.2, 0.4, 0.8)

SUITES = {
    "quick": QUICK,
    "mujoco10": replace(
        HALFCHEETAH,
        description="ten MuJoCo tasks at three lags, a million steps, three seeds",
        algorithms=variants("PPO clip", "ppo_continuous.py", "clip-coef", (0.2, 0.8))
        | {"PPO recomputed": ("ppo_continuous.py", {"recompute-logprobs": True}), "VACO": VACO},
        tasks=MUJOCO,
        lags=(0, 15, 63),
        seeds=(1, 2, 3),
        settings=CHEAP | {"total-timesteps": 1_000_000, "num-evals": 20, "eval-episodes": 10, "compile": True},
    ),
    "tuned": replace(
        TWO_TASKS,
        description="each algorithm at three widths of its trust region, so that none beats a straw man",
        algorithms=variants("PPO clip", "ppo_continuous.py", "clip-coef", (0.2, 0.5, 0.8))
        | variants("VACO delta", "vaco_continuous.py", "delta", (0.1, 0.4, 0.2)),
    ),
    "ablation": replace(
        TWO_TASKS,
        description="what the two parts of VACO add, each alone and together",
        algorithms={
            "neither": ("vaco_continuous.py", {"realign": False, "tv-filter": False}),
            "without realign": ("vaco_continuous.py", {"realign": False}),
            "without filter": ("vaco_continuous.py", {"tv-filter": False}),
            "VACO": VACO,
        },
    ),
    "delta": replace(
        TWO_TASKS,
        description="VACO's threshold from .05 to .8, each against the default .2",
        algorithms=variants("VACO delta", "vaco_continuous.py", "delta", DELTAS),
        pairs=tuple((f"VACO delta {short(x)}", "VACO delta .2") for x in DELTAS if x != 0.2),
    ),
    "forward": replace(
        TWO_TASKS,
        description="forward lag alone: 1 to 40 epochs of each batch, no backward lag",
        algorithms=variants("PPO epochs", "ppo_continuous.py", "update-epochs", EPOCHS)
        | variants("VACO epochs", "vaco_continuous.py", "update-epochs", EPOCHS),
        lags=(0,),
        pairs=tuple((f"VACO epochs {n}", f"PPO epochs {n}") for n in EPOCHS),
    ),
    "halfcheetah": HALFCHEETAH,
    "hopper": replace(
        HALFCHEETAH,
        description="a task whose episodes end early, at a small lag, with 640 gradient steps per batch",
        tasks=("Hopper-v5",),
        lags=(3,),
        settings=CLEANRL | {"update-epochs": 20, "total-timesteps": 300_000} | EVALS,
    ),
    "llm-quick": replace(
        LLM,
        description="GRPO and VACO on a small language model, without lag and under lag, in minutes on two cores",
        algorithms={"GRPO": ("grpo_llm.py", {}), "VACO": ("vaco_llm.py", {})},
        seeds=(1, 2, 3),
        settings=LLM.settings | {"learning-rate": 3e-4},
        pairs=(),
    ),
    "llm": LLM,
}
