"""What is run, as data: a new suite is a copy of an entry of SUITES, a new algorithm a script and the flags it needs.
A variant of an algorithm, one with other epochs say, is an algorithm with a name of its own.

A script takes --env-id (or what `task_flag` names), --lag, --seed, --run-dir and the flags of its suite, and writes
config.json, metrics.csv, evals.csv and, last, result.json into its run directory; it need not know of this package.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    description: str
    algorithms: dict[str, tuple[str, dict]]
    """name in tables and legends -> (script, extra flags)"""
    tasks: tuple[str, ...]
    """environment ids or the like, passed as --env-id or as `task_flag` says"""
    lags: tuple[int, ...]
    seeds: tuple[int, ...]
    settings: dict
    """flags common to all runs, without the dashes: {"num-envs": 16}; True gives --flag, False gives --no-flag"""
    task_flag: str = "env-id"
    step_name: str = "environment steps"
    """what the first column of evals.csv counts"""
    score_name: str = "evaluation return"
    """what its second column, and eval_return in result.json, measure"""
    decimals: int = 1
    """of a score in tables"""
    pairs: tuple[tuple[str, str], ...] = ()
    """(x, y): the report shows x - y, seed by seed; empty: the last algorithm against each of the others"""
    options: str = ""
    """how the command line changed the suite of this name"""

    @property
    def comparisons(self):
        *others, last = self.algorithms
        return self.pairs or tuple((last, other) for other in others)


def short(x):
    """0.5 -> ".5", as the names of algorithms have it"""
    return f"{x:g}".removeprefix("0") if 0 < x < 1 else f"{x:g}"


PPO = ("ppo_continuous.py", {})
PPO_CLIP_5 = ("ppo_continuous.py", {"clip-coef": 0.5})  # clip .2 holds PPO back under lag: the fair baseline is wider
VACO = ("vaco_continuous.py", {})
GRPO_LLM, VACO_LLM = ("grpo_llm.py", {}), ("vaco_llm.py", {})
BASELINES = {"PPO": PPO, "PPO clip .5": PPO_CLIP_5, "VACO": VACO}

# The ten MuJoCo tasks that are usual in papers
MUJOCO = ("Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Humanoid-v5", "HumanoidStandup-v5", "InvertedDoublePendulum-v5")
MUJOCO += ("InvertedPendulum-v5", "Reacher-v5", "Swimmer-v5", "Walker2d-v5")
THREE_TASKS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5")

# Minibatches of 256 with a larger step: 80 gradient steps per batch of 2048.
CHEAP = {"num-envs": 16, "num-steps": 128, "num-minibatches": 8, "update-epochs": 10, "learning-rate": 1e-3}
# CleanRL's minibatch of 64, 10 epochs and learning rate for MuJoCo, 16 environments instead of one: 320 steps.
CLEANRL = CHEAP | {"num-minibatches": 32, "learning-rate": 3e-4}
# Twice the epochs, so more forward lag: 640 steps.
SLOW = CLEANRL | {"update-epochs": 20}

CONTROL = CHEAP | {"total-timesteps": 300_000, "num-evals": 10, "eval-episodes": 10}
EPOCHS = (1, 5, 10, 20, 40)

# A GPT of 230,000 parameters on arithmetic: 100 updates of 16 prompts x 8 completions.
LLM = {"num-updates": 100, "num-prompts": 16, "num-generations": 8, "num-evals": 5}
LLM_RATES = {
    "GRPO 1e-4": ("grpo_llm.py", {"learning-rate": 1e-4}),
    "GRPO 3e-4": ("grpo_llm.py", {"learning-rate": 3e-4}),
    "VACO 3e-4": ("vaco_llm.py", {"learning-rate": 3e-4}),
    "VACO 1e-4": ("vaco_llm.py", {"learning-rate": 1e-4}),
}
LLM_PAIRS = (("VACO 1e-4", "GRPO 1e-4"), ("VACO 3e-4", "GRPO 3e-4"))
LLM_NAMES = {"task_flag": "task", "step_name": "updates", "score_name": "greedy accuracy", "decimals": 3}

SUITES = {
    "quick": Suite(
        description="PPO and VACO without lag and under a lag at which PPO stalls, in minutes on two cores",
        algorithms={"PPO": PPO, "VACO": VACO},
        tasks=("HalfCheetah-v5",),
        lags=(0, 15),
        seeds=(1, 2, 3),
        settings=CHEAP | {"total-timesteps": 150_000, "num-evals": 10, "eval-episodes": 5},
    ),
    "mujoco10": Suite(
        description="ten MuJoCo tasks at four lags, a million steps, ten seeds",
        algorithms=BASELINES,
        tasks=MUJOCO,
        lags=(0, 3, 15, 63),
        seeds=tuple(range(1, 11)),
        settings=CHEAP | {"total-timesteps": 1_000_000, "num-evals": 20, "eval-episodes": 10},
    ),
    "mujoco10-100m": Suite(
        description="the same for a hundred million steps, four seeds: days on a cluster",
        algorithms=BASELINES,
        tasks=MUJOCO,
        lags=(0, 3, 15, 63),
        seeds=(1, 2, 3, 4),
        settings=CHEAP | {"total-timesteps": 100_000_000, "num-evals": 50, "eval-episodes": 10},
    ),
    "tuned": Suite(
        description="each algorithm at three widths of its trust region, so that none beats a straw man",
        algorithms={f"PPO clip {short(x)}": ("ppo_continuous.py", {"clip-coef": x}) for x in (0.2, 0.3, 0.5)}
        | {f"VACO delta {short(x)}": ("vaco_continuous.py", {"delta": x}) for x in (0.1, 0.4, 0.2)},
        tasks=THREE_TASKS,
        lags=(0, 15),
        seeds=(1, 2, 3, 4, 5),
        settings=CONTROL,
    ),
    "ablation": Suite(
        description="what the two parts of VACO add, each alone and together",
        algorithms={
            "neither": ("vaco_continuous.py", {"realign": False, "tv-filter": False}),
            "without realign": ("vaco_continuous.py", {"realign": False}),
            "without filter": ("vaco_continuous.py", {"tv-filter": False}),
            "VACO": VACO,
        },
        tasks=THREE_TASKS,
        lags=(0, 15),
        seeds=(1, 2, 3, 4, 5),
        settings=CONTROL,
    ),
    "delta": Suite(
        description="VACO's threshold from .05 to .8, each against the default .2",
        algorithms={f"VACO delta {short(x)}": ("vaco_continuous.py", {"delta": x}) for x in (0.05, 0.1, 0.2, 0.4, 0.8)},
        tasks=THREE_TASKS,
        lags=(0, 15),
        seeds=(1, 2, 3, 4, 5),
        settings=CONTROL,
        pairs=tuple((f"VACO delta {short(x)}", "VACO delta .2") for x in (0.05, 0.1, 0.4, 0.8)),
    ),
    "forward": Suite(
        description="forward lag alone: 1 to 40 epochs of each batch, no backward lag",
        algorithms={
            f"{name} {epochs} epochs": (script, {"update-epochs": epochs})
            for name, (script, _) in (("PPO", PPO), ("VACO", VACO))
            for epochs in EPOCHS
        },
        tasks=THREE_TASKS,
        lags=(0,),
        seeds=(1, 2, 3, 4, 5),
        settings=CONTROL,
        pairs=tuple((f"VACO {epochs} epochs", f"PPO {epochs} epochs") for epochs in EPOCHS),
    ),
    "halfcheetah": Suite(
        description="how much of PPO's loss under lag is its clip: PPO with clip .2 and .5 beside VACO",
        algorithms=BASELINES,
        tasks=("HalfCheetah-v5",),
        lags=(0, 15),
        seeds=(1, 2, 3, 4, 5),
        settings=CONTROL,
    ),
    "hopper": Suite(
        description="a task whose episodes end early, at a small lag, with many gradient steps per batch",
        algorithms=BASELINES,
        tasks=("Hopper-v5",),
        lags=(3,),
        seeds=(1, 2, 3, 4, 5),
        settings=SLOW | {"total-timesteps": 300_000, "num-evals": 10, "eval-episodes": 10},
    ),
    "ppo-1m": Suite(
        description="PPO without lag for a million steps, to hold against published PPO results",
        algorithms={"PPO": PPO},
        tasks=("HalfCheetah-v5",),
        lags=(0,),
        seeds=(1, 2),
        settings=CLEANRL | {"total-timesteps": 1_000_000, "num-evals": 10, "eval-episodes": 10},
    ),
    "lag-cost": Suite(
        description="steps per second at lag 63 and at lag 0: the column sps of results.csv",
        algorithms={"PPO": PPO, "VACO": VACO},
        tasks=("HalfCheetah-v5",),
        lags=(0, 63),
        seeds=(1, 2, 3),
        settings=CHEAP | {"total-timesteps": 150_000, "num-evals": 1, "eval-episodes": 1},
    ),
    "llm-quick": Suite(
        description="GRPO and VACO on a small language model, without lag and under lag, in minutes on two cores",
        algorithms={"GRPO": GRPO_LLM, "VACO": VACO_LLM},
        tasks=("arithmetic",),
        lags=(0, 16),
        seeds=(1, 2, 3),
        settings=LLM | {"learning-rate": 3e-4},
        **LLM_NAMES,
    ),
    "llm": Suite(
        description="the same with five seeds, each algorithm at two learning rates",
        algorithms=LLM_RATES,
        tasks=("arithmetic",),
        lags=(0, 16),
        seeds=(1, 2, 3, 4, 5),
        settings=LLM,
        pairs=LLM_PAIRS,
        **LLM_NAMES,
    ),
    "llm-grid": Suite(
        description="three lags, one and four minibatches per batch, two learning rates",
        algorithms={
            f"{name} {rate} N={minibatches}": (script, {"learning-rate": float(rate), "num-minibatches": minibatches})
            for minibatches in (1, 4)
            for rate in ("1e-4", "3e-4")
            for name, (script, _) in (("GRPO", GRPO_LLM), ("VACO", VACO_LLM))
        },
        tasks=("arithmetic",),
        lags=(0, 16, 32),
        seeds=(1, 2, 3, 4, 5),
        settings=LLM,
        pairs=tuple((f"VACO {r} N={n}", f"GRPO {r} N={n}") for n in (1, 4) for r in ("1e-4", "3e-4")),
        **LLM_NAMES,
    ),
    "llm-ablation": Suite(
        description="what the two parts of VACO add for a language model, with backward and forward lag",
        algorithms={
            "neither": ("vaco_llm.py", {"realign": False, "tv-filter": False}),
            "without realign": ("vaco_llm.py", {"realign": False}),
            "without filter": ("vaco_llm.py", {"tv-filter": False}),
            "VACO": VACO_LLM,
        },
        tasks=("arithmetic",),
        lags=(16,),
        seeds=(1, 2, 3, 4, 5),
        settings=LLM | {"num-minibatches": 4, "learning-rate": 3e-4},
        **LLM_NAMES,
    ),
    "llm-long": Suite(
        description="four times the updates, at twice the lag",
        algorithms=LLM_RATES,
        tasks=("arithmetic",),
        lags=(32,),
        seeds=(1, 2, 3),
        settings=LLM | {"num-updates": 400},
        pairs=LLM_PAIRS,
        **LLM_NAMES,
    ),
    "llm-forward": Suite(
        description="eight gradient steps per batch, under lag: forward and backward lag together",
        algorithms=LLM_RATES,
        tasks=("arithmetic",),
        lags=(16,),
        seeds=(1, 2, 3),
        settings=LLM | {"num-minibatches": 4, "update-epochs": 2},
        pairs=LLM_PAIRS,
        **LLM_NAMES,
    ),
}
