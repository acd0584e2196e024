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
import json
import math
import os
import sys
import warnings
from pathlib import Path
from textwrap import indent

import gymnasium as gym
import numpy as np
import torch
import tyro

CONTROL, LLM = ("ppo_continuous", "vaco_continuous"), ("grpo_llm", "vaco_llm")
AT_ONCE = 16  # environments of an evaluation longer than the run's own
LONGEST_FILM = 2000  # frames; all are kept until the film is written, about 0.7 MB each


@dataclasses.dataclass
class Options:
    run_dir: tyro.conf.Positional[Path]  # folder of the run
    episodes: int | None = None  # episodes to play, or problems to solve; None: as many as the run's own evaluations
    seed: int | None = None  # seed of starts and noise, or of problems and tokens; None: the run's
    device: str | None = None  # torch device of the networks; None: the run's
    video: bool = False  # film the first episode (control; pip install moviepy)
    out: Path | None = None  # folder for the film; None: RUN_DIR/video
    prompt: str | None = None  # complete this problem with the likeliest tokens, evaluate nothing (language models)


# ----------------------------------------------------------------------------------------------- reading a run


def open_run(run_dir: Path):
    """(module of the script, its Args) of the run in a folder."""
    path = run_dir / "config.json"
    try:
        config = json.loads(path.read_text())
        name = config["script"]
        if name not in CONTROL + LLM:  # before the import: a folder from elsewhere must not choose a module
            raise ValueError(f"a run of {name!r}")
        script = importlib.import_module(name)
        return script, script.Args(**config["args"])
    except Exception as error:  # no such file, a damaged one, or settings that this version does not know
        raise ValueError(f"{path} is of no run of {', '.join(CONTROL + LLM)} here: {error}") from error


def load_policy(run_dir: Path, model: torch.nn.Module, name: str, step: str) -> tuple[str, int | None]:
    """Gives the model the weights of the run's policy, `name` in a checkpoint. Returns where they are from, and the
    step: None for the last."""
    path = next((x for x in (run_dir / "model.pt", run_dir / "checkpoint.pt") if x.exists()), None)
    if path is None:
        raise ValueError(f"{run_dir} holds no model.pt and no checkpoint.pt: this run has no policy")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if path.name == "model.pt":
            model.load_state_dict(saved)
            return path.name, None
        model.load_state_dict(saved[name])
        return f"checkpoint after update {saved['state']['iteration']}", saved["state"][step]
    except Exception as error:  # a damaged file, or weights of other networks
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} does not hold the networks that config.json asks for ({reason:.80})") from error


def own_evaluation(run_dir: Path, step: int | None) -> dict[str, float]:
    """The row of evals.csv after so many steps; None: the last row. Empty where there is none."""
    try:
        with open(run_dir / "evals.csv", newline="") as file:
            rows = [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]
    except (OSError, ValueError, TypeError):  # no evaluations, or half a line
        return {}
    rows = [row for row in rows if step in (None, next(iter(row.values())))]
    return rows[-1] if rows else {}


def line(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {x}" for name, x in scores.items())


def report(title: str, scores: dict[str, float], own: dict[str, float]) -> None:
    """One line of scores, and one that compares them with the run's own, if there are any."""
    print(f"{title}: {line(scores)}")
    own = {name: x for name, x in own.items() if name in scores}
    if own and all(scores[name] == x for name, x in own.items()):
        print("equal to the run's own evaluation, to the last digit")
    elif own:
        print(f"not equal to the run's own evaluation ({line(own)}): another device, machine, version or environment")


# ----------------------------------------------------------------------------------------------------- control


def evaluate_control(script, args, own_args, agent) -> tuple[np.ndarray, np.ndarray]:
    """(returns, lengths) of the episodes, in one batch as in the run; where there are more, in portions, each with a
    seed of its own, so that their environments fit in memory."""
    portions, seed = [args.eval_episodes], args.seed
    if args.eval_episodes > max(own_args.eval_episodes, AT_ONCE):
        full, rest = divmod(args.eval_episodes, AT_ONCE)
        portions = [AT_ONCE] * full + [rest] * (rest > 0)
    results = []
    for i, episodes in enumerate(portions):
        results.append(script.evaluate(agent, args.env_id, episodes, [seed, i] if i else seed))
    returns, lengths = (np.concatenate(x) for x in zip(*results, strict=True))
    script.require_finite("returns", torch.as_tensor(returns))
    return returns, lengths


def film_first(script, args, folder: Path) -> None:
    """From now on the first environment that the script makes is filmed until its first episode ends: the first of the
    evaluation's episodes, with its start and its noise. Drawing changes nothing in the simulation. Raises where nothing
    can be drawn or written here, before an evaluation is spent on it."""
    import moviepy  # noqa: F401 (gymnasium's RecordVideo imports it much later)
    from matplotlib.image import imsave

    try:
        env = gym.make(args.env_id, render_mode="rgb_array")
        env.reset(seed=0)
        assert isinstance(env.render(), np.ndarray), "render gives no picture"
        env.close()
    except Exception as error:  # of the environment, of MuJoCo's import, or of the graphics driver
        backend = os.environ.get("MUJOCO_GL")
        raise ValueError(f"--video: {args.env_id} cannot be drawn here ({error}; MUJOCO_GL is {backend})") from error
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

    def make_filmed(env_id: str) -> gym.Env:
        script.make_env = make_env  # the others are not filmed
        env = make_env(env_id)
        follow(env)
        first = {"episode_trigger": lambda episode: episode == 0, "video_length": LONGEST_FILM}
        with warnings.catch_warnings(action="ignore"):  # that the folder exists
            return Film(env, str(folder), name_prefix=f"seed{args.seed}", **first)

    make_env, script.make_env = script.make_env, make_filmed
    # in the registry, since the script's make_env has no argument for it
    gym.spec(args.env_id.split(":")[-1]).kwargs["render_mode"] = "rgb_array"


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


# -------------------------------------------------------------------------------------------------------- main


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)  # as in training; sums of other numbers of threads round differently
    run_dir = options.run_dir.expanduser()
    folder = options.out or run_dir / "video"
    try:  # can what is asked for be done?
        if options.video and sys.platform == "linux":
            os.environ.setdefault("MUJOCO_GL", "egl")  # draws without a display; MuJoCo reads it as it is imported
        script, own_args = open_run(run_dir)
        control = script.__name__ in CONTROL
        count = "eval_episodes" if control else "eval_problems"
        episodes = getattr(own_args, count) if options.episodes is None else options.episodes
        prompt = options.prompt
        refusals = {
            f"--prompt is for language models, not for {script.__name__}": control and prompt is not None,
            f"--video is for control, not for {script.__name__}": options.video and not control,
            "--out is the folder of a film; add --video": options.out and not options.video,
            "--prompt evaluates nothing; leave out --episodes and --seed": prompt is not None
            and (options.episodes, options.seed) != (None, None),
            f"--episodes must lie in 1 .. 100000, not {episodes}": prompt is None and not 1 <= episodes <= 100_000,
        }
        for message, wrong in refusals.items():
            if wrong:
                raise ValueError(message)
        changes = {count: episodes, "seed": options.seed, "device": options.device}
        args = dataclasses.replace(own_args, **{name: x for name, x in changes.items() if x is not None})
        if control:
            # each HalfCheetah would warn of its model's format
            script.mujoco.set_mju_user_warning(lambda text: "settotalmass" in text or print(text, file=sys.stderr))
            env = script.make_env(args.env_id)
            agent = script.Agent(env.observation_space.shape[0], math.prod(env.action_space.shape)).to(args.device)
            what, step = load_policy(run_dir, agent, "agent", "global_step")
            if options.video:
                film_first(script, args, folder)
        else:
            task = script.make_task(args)
            tokenizer = script.CharTokenizer(task.alphabet)
            model = script.new_model(args, task, tokenizer, torch.device(args.device))
            what, step = load_policy(run_dir, model, "model", "iteration")
            if prompt is not None and not (set(prompt) <= set(task.alphabet) and 0 < len(prompt) <= task.prompt_length):
                wanted = f"1 to {task.prompt_length} characters of {task.alphabet!r}"
                raise ValueError(f"--prompt must be {wanted}, not {prompt!r}")
    except Exception as error:
        print(f"{Path(__file__).name}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)

    # on another device they may still round differently
    same = args == dataclasses.replace(own_args, device=args.device)
    own = own_evaluation(run_dir, step) if same else {}
    title = f"({what}), seed {args.seed}, {episodes}"
    if control:
        returns, lengths = evaluate_control(script, args, own_args, agent)
        scores = {"eval_return": returns.mean(), "eval_std": returns.std(), "eval_length": lengths.mean()}
        report(f"{args.env_id} {title} episodes", scores, own)
        if options.video:
            part = f"its first {LONGEST_FILM} steps" if lengths[0] > LONGEST_FILM else f"{lengths[0]} steps"
            print(f"film of the first of these episodes, return {returns[0]}, {part}: {folder}")
    elif prompt is None:
        scores, examples = script.evaluate(model, task, tokenizer, args)
        report(f"{args.task} {title} problems", scores, own)
        print("\nsampled completions:")
        for prompt, text, answer, reward in examples:
            print(f"{prompt}  ({'right' if reward else f'wrong, the answer is {answer}'})\n{indent(text, '    ')}")
    else:
        problem = script.Problem(prompt, solution="", answer="0")  # the answer is unknown, the reward not looked at
        batch, texts = script.generate(model, task, tokenizer, [problem], 1, args)
        print(texts[0])
        if batch["truncated"].any():
            print(f"cut after {args.completion_length} characters, without an end", file=sys.stderr)


if __name__ == "__main__":
    main()
