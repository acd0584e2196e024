"""Evaluates, films or talks to the policy of a run, through the functions of the script that trained it.

    python evaluate.py RUN_DIR                    # the run's own last evaluation once more, to the last digit
    python evaluate.py RUN_DIR --seed 7 --episodes 50
    python evaluate.py RUN_DIR --video            # control: also a film of the first episode, and eight frames of it
    python evaluate.py RUN_DIR --prompt "7+5-3="  # language model: completes a problem of yours

RUN_DIR holds config.json and model.pt, or, where the run is not finished, a checkpoint. Nothing in it is changed; a
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
LONGEST_FILM = 2000  # frames; all are kept until the film is written, about 0.7 MB each


@dataclasses.dataclass(frozen=True)
class Options:
    run_dir: tyro.conf.Positional[Path]
    """folder of the run"""
    episodes: int | None = None
    """episodes to play, or held-out problems to solve; None: as many as the run's own evaluations"""
    seed: int | None = None
    """seed of starts and noise, or of problems and tokens; None: the run's"""
    device: str | None = None
    """torch device of the networks; None: the run's"""
    video: bool = False
    """film the first episode (control; pip install moviepy)"""
    out: Path | None = None
    """folder for the film; None: RUN_DIR/video"""
    prompt: str | None = None
    """complete this problem, always with the likeliest token, and evaluate nothing (language models)"""


class Refused(ValueError):
    """What was asked for cannot be done; the message says what to change. Exit code 2."""


# ----------------------------------------------------------------------------------------------- reading a run


def open_run(run_dir: Path, video: bool):
    """(module of the script, its Args) of the run in a folder. Raises Refused."""
    path = run_dir / "config.json"
    try:
        config = json.loads(path.read_text())
        name = config.get("script") or Path(config["command"][0]).stem
        stored = config["args"] | {"run_dir": None}
    except Exception as error:  # no such file, or whatever a damaged one leads to
        reason = getattr(error, "strerror", None) or "damaged"
        raise Refused(f"{path} cannot be read ({reason}); name the folder of a run") from error
    if name not in CONTROL + LLM:  # before the import: a folder from elsewhere must not choose a module
        raise Refused(f"{path}: a run of {name!r}, not of {', '.join(CONTROL + LLM)}")
    if video and sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # draws without a display; MuJoCo reads it as it is imported
    script = importlib.import_module(name)
    try:
        return script, script.Args(**stored)
    except Exception as error:  # fields or values that this version of the script does not know
        raise Refused(f"{path} does not fit {name}.py: {' '.join(str(error).split())}") from error


def load_policy(script, run_dir: Path, model: torch.nn.Module, name_in_checkpoint: str) -> tuple[str, int | None]:
    """Gives the model the weights of the run's policy. Returns where they are from, and the update: None for the last.
    Raises Refused."""
    for path in (run_dir / "model.pt", run_dir / "checkpoint.pt", run_dir / "checkpoint_previous.pt"):
        try:
            saved, what, iteration = script.read_file(path, "cpu"), path.name, None
            if path.name != "model.pt":
                saved, iteration = saved[name_in_checkpoint], saved["iteration"]
                what = f"checkpoint after update {iteration}"
        except FileNotFoundError:
            continue
        except Exception as error:  # whatever a damaged file leads to
            raise Refused(f"{path} is damaged ({error!r:.80}); move it away to use an older one") from error
        try:
            model.load_state_dict(saved)
        except Exception as error:  # other names or shapes, or no state_dict at all
            raise Refused(f"{path} does not fit the networks that config.json asks for") from error
        return what, iteration
    raise Refused(f"{run_dir} holds no model.pt and no checkpoint.pt: this run has no policy")


def own_evaluation(run_dir: Path, step: int | None) -> dict[str, float]:
    """The row of evals.csv after so many steps; None: the last row. Empty where there is none."""
    try:
        with open(run_dir / "evals.csv", newline="") as file:
            rows = [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]
    except (OSError, ValueError, TypeError):
        return {}
    rows = [row for row in rows if step in (None, next(iter(row.values())))]
    return rows[-1] if rows else {}


def report(title: str, scores: dict[str, float], own: dict[str, float]) -> None:
    """One line of scores, and one that compares them with the run's own, if there are any."""

    def line(scores: dict[str, float]) -> str:
        return ", ".join(f"{name} {x}" for name, x in scores.items())

    print(f"{title}: {line(scores)}")
    own = {name: x for name, x in own.items() if name in scores}
    if own and all(scores[name] == x for name, x in own.items()):
        print("equal to the run's own evaluation, to the last digit")
    elif own:
        print(f"not equal to the run's own evaluation ({line(own)}): another device, machine, version or environment")


# ----------------------------------------------------------------------------------------------------- control


def evaluate_control(script, args, own_args, options: Options) -> None:
    if options.prompt is not None:
        raise Refused(f"--prompt is for runs of {' and '.join(LLM)}; this one is of {script.__name__}")
    if options.video:
        refuse_film(script, args.env_id)
    device = script.open_device(args.device)
    env = script.make_env(args.env_id)
    env.close()
    agent = script.Agent(env.observation_space.shape[0], math.prod(env.action_space.shape)).to(device)
    what, iteration = load_policy(script, options.run_dir, agent, "agent")
    folder = options.out or options.run_dir / "video"
    with filmed(script, args, folder) if options.video else nullcontext():
        returns, lengths = script.evaluate(agent, args.env_id, args.eval_episodes, args.seed)
    script.require_finite("returns", torch.as_tensor(returns))
    scores = {"eval_return": returns.mean(), "eval_std": returns.std(), "eval_length": lengths.mean()}
    step = None if iteration is None else iteration * args.batch_size
    own = own_evaluation(options.run_dir, step) if same_evaluation(args, own_args) else {}
    report(f"{args.env_id} ({what}), seed {args.seed}, {args.eval_episodes} episodes", scores, own)
    if options.video:
        part = f"its first {LONGEST_FILM} steps" if lengths[0] > LONGEST_FILM else f"{lengths[0]} steps"
        print(f"film of the first of these episodes, return {returns[0]}, {part}: {folder}")


def refuse_film(script, env_id: str) -> None:
    """Raises Refused, before an evaluation is spent on it, for what cannot be filmed or drawn here."""
    try:
        import matplotlib  # noqa: F401
        import moviepy  # noqa: F401 (gymnasium's RecordVideo imports it much later)
    except ImportError as error:
        raise Refused(f'--video needs {error.name}: pip install "gymnasium[other]", or moviepy') from error
    try:
        script.show_mujoco_warnings()
        with warnings.catch_warnings(action="ignore"):  # the error says it
            env = gym.make(env_id, render_mode="rgb_array")
        env.reset(seed=0)
        assert isinstance(env.render(), np.ndarray), "render gives no picture"
        env.close()
    except Exception as error:  # of the environment, of MuJoCo's import, or of the graphics driver
        reason, backend = " ".join(str(error).split()), os.environ.get("MUJOCO_GL")
        raise Refused(f"--video: {env_id} cannot be drawn here ({reason}; MUJOCO_GL is {backend})") from error


@contextmanager
def filmed(script, args, folder: Path):
    """Films the first environment that the script makes, until its first episode ends: the first of the evaluation's
    episodes, with its start and its noise. Drawing changes nothing in the simulation. Raises Refused for a folder that
    cannot be written."""
    from matplotlib.image import imsave

    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "frames.png").touch()
    except OSError as error:
        raise Refused(f"--out {folder} cannot be written ({error.strerror}); name another folder") from error

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


def evaluate_llm(script, args, own_args, options: Options) -> None:
    if options.video:
        raise Refused(f"--video is for runs of {' and '.join(CONTROL)}; this one is of {script.__name__}")
    device = script.open_device(args.device)
    task = script.make_task(args)
    tokenizer = script.CharTokenizer(task.alphabet)
    model = script.new_model(args, task, tokenizer, device)
    what, iteration = load_policy(script, options.run_dir, model, "model")
    if options.prompt is not None:
        return complete(script, args, model, task, tokenizer, options.prompt)
    scores, examples = script.evaluate(model, task, tokenizer, args)
    own = own_evaluation(options.run_dir, iteration) if same_evaluation(args, own_args) else {}
    report(f"{args.task} ({what}), seed {args.seed}, {args.eval_problems} problems", scores, own)
    print("\nsampled completions:")
    for prompt, completion, answer, reward in examples:
        print(f"{prompt}  ({'right' if reward else f'wrong, the answer is {answer}'})\n{indent(completion, '    ')}")


def complete(script, args, model, task, tokenizer, prompt: str) -> None:
    """Prints the likeliest completion of a prompt. Raises Refused for one that the model cannot read."""
    unknown = sorted(set(prompt) - set(task.alphabet))
    if unknown or not 1 <= len(prompt) <= task.prompt_length:
        wanted = f"1 to {task.prompt_length} characters of {task.alphabet!r}"
        raise Refused(f"--prompt must be {wanted}, not {''.join(unknown) or prompt!r}")
    problem = script.Problem(prompt, solution="", answer="0")  # the answer is unknown and the reward not looked at
    batch, texts = script.complete(model, task, tokenizer, [problem], 1, args)
    print(texts[0])
    if batch["truncated"].any():
        print(f"cut after {args.completion_length} characters, without an end", file=sys.stderr)


# -------------------------------------------------------------------------------------------------------- main


def same_evaluation(args, own_args) -> bool:
    """Whether the run's own evaluations had these episodes; on another device they may still round differently."""
    return args == dataclasses.replace(own_args, device=args.device)


def run(options: Options) -> None:
    """Raises Refused; FloatingPointError and TimeoutError for a policy or an environment that is at fault."""
    torch.set_num_threads(1)  # as in training; sums of other numbers of threads round differently
    if options.out and not options.video:
        raise Refused("--out is the folder of a film; add --video")
    if options.prompt is not None and (options.episodes, options.seed) != (None, None):
        raise Refused("--prompt evaluates nothing; leave out --episodes and --seed")
    script, own_args = open_run(options.run_dir, options.video)
    count = "eval_episodes" if script.__name__ in CONTROL else "eval_problems"
    changes = {count: options.episodes, "seed": options.seed, "device": options.device}
    try:
        args = dataclasses.replace(own_args, **{name: x for name, x in changes.items() if x is not None})
    except ValueError as error:
        raise Refused(str(error)) from error
    if not 1 <= getattr(args, count) <= 10**5 and options.prompt is None:
        raise Refused(f"--episodes must lie in 1 .. 100000, not {getattr(args, count)}")
    try:
        (evaluate_control if script.__name__ in CONTROL else evaluate_llm)(script, args, own_args, options)
    except script.Refused as error:  # each script has its own
        raise Refused(str(error)) from error


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    try:
        run(options)
    except (Refused, FloatingPointError, TimeoutError) as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, Refused) else 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
