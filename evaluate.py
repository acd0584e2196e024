"""Evaluates, films or talks to the policy of a run, through the functions of the script that trained it.

    python evaluate.py RUN_DIR                    # the run's own last evaluation once more, to the last digit
    python evaluate.py RUN_DIR --seed 7 --episodes 50
    python evaluate.py RUN_DIR --video            # control: also a film of the first episode, and eight frames of it
    python evaluate.py RUN_DIR --prompt "7+5-3="  # language model: completes a problem of yours

RUN_DIR holds config.json and model.pt, or, where the run is not finished, checkpoint.pt. Nothing in it is changed; a
film goes to a new folder. A tool, not an algorithm: unlike the scripts, it imports them.
"""

import csv
import dataclasses
import importlib
import itertools
import json
import math
import os
import sys
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path
from textwrap import indent

import gymnasium as gym
import numpy as np
import torch
import tyro

CONTROL, LLM = ("ppo_continuous", "vaco_continuous"), ("grpo_llm", "vaco_llm")
PORTION = 16  # environments at once
LONGEST_FILM = 2000  # frames; all are kept until the film is written, about 0.7 MB each


@dataclasses.dataclass
class Options:
    run_dir: tyro.conf.Positional[Path]  # folder of the run
    episodes: int | None = None  # episodes, or held-out problems; None: as many as the run's own evaluations
    seed: int | None = None  # seed of starts and noise, or of problems and tokens; None: the run's
    device: str | None = None  # torch device of the networks; None: the run's
    video: bool = False  # film the first episode (control; pip install moviepy)
    out: Path | None = None  # folder for the film; None: RUN_DIR/video
    prompt: str | None = None  # complete this problem with the likeliest tokens, evaluate nothing (language models)


# ----------------------------------------------------------------------------------------------- reading a run


def open_run(options: Options):
    """(module of the script, its Args) of the run in a folder."""
    config = json.loads((options.run_dir / "config.json").read_text())
    if config["script"] not in CONTROL + LLM:  # before the import: a folder from elsewhere must not choose a module
        raise ValueError(f"{options.run_dir}: a run of {config['script']!r}, not of {', '.join(CONTROL + LLM)}")
    if options.video and sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # draws without a display; MuJoCo reads it as it is imported
    script = importlib.import_module(config["script"])
    return script, script.Args(**config["args"] | {"run_dir": None})


def load_policy(run_dir: Path, model: torch.nn.Module, name_in_checkpoint: str) -> tuple[str, int | None]:
    """Gives the model the weights of the run's policy. Returns where they are from, and the update: None for the
    last."""
    if (run_dir / "model.pt").exists():
        model.load_state_dict(torch.load(run_dir / "model.pt", map_location="cpu", weights_only=True))
        return "model.pt", None
    saved = torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(saved[name_in_checkpoint])
    iteration = saved["state"]["iteration"]
    return f"checkpoint after update {iteration}", iteration


def own_evaluation(run_dir: Path, step: int | None) -> dict[str, float]:
    """The row of evals.csv after so many steps; None: the last row. Empty where there is none."""
    if not (run_dir / "evals.csv").exists():
        return {}
    with open(run_dir / "evals.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]  # the last may be half a line
    rows = [{name: float(x) for name, x in row.items()} for row in rows]
    rows = [row for row in rows if step in (None, next(iter(row.values())))]
    return rows[-1] if rows else {}


def report(title: str, scores: dict[str, float], own: dict[str, float]) -> None:
    """One line of scores, and one that compares them with the run's own, if there are any."""
    own = {name: x for name, x in own.items() if name in scores}
    print(f"{title}: {', '.join(f'{name} {x}' for name, x in scores.items())}")
    if own and all(scores[name] == x for name, x in own.items()):
        print("equal to the run's own evaluation, to the last digit")
    elif own:
        print(f"not equal to the run's own evaluation, {own}: another device, machine, version or environment")


# ----------------------------------------------------------------------------------------------------- control


def evaluate_control(script, args, is_own: bool, options: Options) -> None:
    env = script.make_env(args.env_id)
    env.close()
    if options.video:
        try_film(args.env_id)
    agent = script.Agent(env.observation_space.shape[0], math.prod(env.action_space.shape)).to(args.device)
    what, iteration = load_policy(options.run_dir, agent, "agent")
    folder = options.out or options.run_dir / "video"
    with filmed(script, args, folder) if options.video else nullcontext():
        if is_own:
            returns, lengths = script.evaluate(agent, args.env_id, args.eval_episodes, args.seed)
        else:  # in portions: as many environments as episodes take as much memory
            starts = range(0, args.eval_episodes, PORTION)
            seeds = [args.seed, *np.random.SeedSequence(args.seed).generate_state(len(starts)).tolist()]
            parts = []
            for start, seed in zip(starts, seeds, strict=False):
                episodes = min(PORTION, args.eval_episodes - start)
                parts.append(script.evaluate(agent, args.env_id, episodes, seed))
            returns, lengths = (np.concatenate(part) for part in zip(*parts, strict=True))
    script.require_finite("returns", torch.as_tensor(returns))
    scores = {"eval_return": returns.mean(), "eval_std": returns.std(), "eval_length": lengths.mean()}
    step = None if iteration is None else iteration * args.batch_size
    own = own_evaluation(options.run_dir, step) if is_own else {}
    report(f"{args.env_id} ({what}), seed {args.seed}, {args.eval_episodes} episodes", scores, own)
    if options.video:
        part = f"its first {LONGEST_FILM} steps" if lengths[0] > LONGEST_FILM else f"{lengths[0]} steps"
        print(f"film of the first of these episodes, return {returns[0]}, {part}: {folder}")


def try_film(env_id: str) -> None:
    """Raises ValueError, before an evaluation is spent on it, for what cannot be filmed or drawn here."""
    try:
        import matplotlib  # noqa: F401
        import moviepy  # noqa: F401 (gymnasium's RecordVideo imports it much later)
    except ImportError as error:
        raise ValueError(f'--video needs {error.name}: pip install "gymnasium[other]", or moviepy') from error
    try:
        with warnings.catch_warnings(action="ignore"):  # the error says it
            env = gym.make(env_id, render_mode="rgb_array")
        env.reset(seed=0)
        assert isinstance(env.render(), np.ndarray), "render gives no picture"
        env.close()
    except Exception as error:  # of the environment, of MuJoCo's import, or of the graphics driver
        backend = os.environ.get("MUJOCO_GL")
        raise ValueError(f"--video: {env_id} cannot be drawn here ({error}; MUJOCO_GL is {backend})") from error


@contextmanager
def filmed(script, args, folder: Path):
    """Films the first environment that the script makes, until its first episode ends: the first of the evaluation's
    episodes, with its start and its noise. Drawing changes nothing in the simulation."""
    from matplotlib.image import imsave

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "frames.png").touch()

    class Film(gym.wrappers.RecordVideo):
        def reset(self, **options):
            if self.recording:  # a film of limited length would go on into the next episode
                self.stop_recording()
            return super().reset(**options)

        def stop_recording(self):
            inds = np.linspace(0, len(self.recorded_frames) - 1, 8).round().astype(int)
            imsave(folder / "frames.png", np.concatenate([self.recorded_frames[i] for i in inds], axis=1))
            super().stop_recording()

    make_env, numbers, kwargs = script.make_env, itertools.count(), gym.spec(args.env_id.split(":")[-1]).kwargs

    def make_filmed(env_id: str) -> gym.Env:
        env = make_env(env_id)
        if next(numbers) > 0:
            return env
        follow(env)
        first = {"episode_trigger": lambda episode: episode == 0, "video_length": LONGEST_FILM}
        with warnings.catch_warnings(action="ignore"):  # that the folder exists
            return Film(env, str(folder), name_prefix=f"seed{args.seed}", **first)

    script.make_env, before = make_filmed, dict(kwargs)
    kwargs["render_mode"] = "rgb_array"  # in the registry, since the script's make_env has no argument for it
    try:
        yield
    finally:
        script.make_env = make_env
        kwargs.clear()
        kwargs.update(before)


def follow(env: gym.Env) -> None:
    """Films a MuJoCo environment that names no camera with the `track` of its model, if there is one, over a floor that
    is drawn as far as it runs. By default gymnasium 1.4 films from where it starts, and it runs out of the picture."""
    renderer = getattr(env.unwrapped, "mujoco_renderer", None)
    if renderer is None or renderer.camera_id != -1:
        return
    import mujoco

    model = renderer.model
    renderer.camera_id = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, "track")  # -1: none
    floors = (model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE) & (model.geom_matid >= 0)
    model.geom_size[floors] *= 10  # how much is drawn; to the physics a plane has no end
    model.mat_texrepeat[model.geom_matid[floors]] *= 10


# --------------------------------------------------------------------------------------------- language models


def evaluate_llm(script, args, is_own: bool, options: Options) -> None:
    task = script.make_task(args)
    tokenizer = script.CharTokenizer(task.alphabet)
    model = script.new_model(args, task, tokenizer, torch.device(args.device))
    what, iteration = load_policy(options.run_dir, model, "model")
    if options.prompt is not None:
        if not set(options.prompt) <= set(task.alphabet) or not 1 <= len(options.prompt) <= task.prompt_length:
            raise ValueError(f"--prompt must be 1 to {task.prompt_length} characters of {task.alphabet!r}")
        problem = script.Problem(options.prompt, solution="", answer="0")  # the reward is not looked at
        batch, texts = script.generate(model, task, tokenizer, [problem], 1, args)
        return print(texts[0] + (" (cut, without an end)" if batch["truncated"].any() else ""))
    scores, examples = script.evaluate(model, task, tokenizer, args)
    own = own_evaluation(options.run_dir, iteration) if is_own else {}
    report(f"{args.task} ({what}), seed {args.seed}, {args.eval_problems} problems", scores, own)
    print("\nsampled completions:")
    for prompt, completion, answer, reward in examples:
        print(f"{prompt}  ({'right' if reward else f'wrong, the answer is {answer}'})\n{indent(completion, '    ')}")


# -------------------------------------------------------------------------------------------------------- main


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    options.run_dir, options.out = options.run_dir.expanduser(), options.out and options.out.expanduser()
    torch.set_num_threads(1)  # as in training; sums of other numbers of threads round differently
    try:
        script, own_args = open_run(options)
        is_control = script.__name__ in CONTROL
        if options.prompt is not None and (is_control or options.episodes or options.seed):
            raise ValueError(f"--prompt is for runs of {' and '.join(LLM)}, without --episodes and --seed")
        if (options.video and not is_control) or (options.out and not options.video):
            raise ValueError(f"--video is for runs of {' and '.join(CONTROL)}, --out for --video")
        count = "eval_episodes" if is_control else "eval_problems"
        changes = {count: options.episodes, "seed": options.seed, "device": options.device}
        args = dataclasses.replace(own_args, **{name: x for name, x in changes.items() if x is not None})
        if not 1 <= getattr(args, count) <= 10**5:
            raise ValueError(f"--episodes must lie in 1 .. 100000, not {getattr(args, count)}")
        is_own = args == dataclasses.replace(own_args, device=args.device)
        (evaluate_control if is_control else evaluate_llm)(script, args, is_own, options)
    except FloatingPointError as error:  # the policy is at fault
        sys.exit(f"{Path(__file__).name}: {error}")
    except Exception as error:  # of whatever kind: files, environments, torch and graphics have their own
        print(f"{Path(__file__).name}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
