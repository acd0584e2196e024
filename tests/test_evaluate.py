"""evaluate.py on real runs of all four scripts: the same numbers in a new process, films, prompts, refusals."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import CONTROL, ENVIRONMENT, LLM, flags, load, read_csv, run_script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import evaluate

# six updates and one checkpoint, after the fourth; evaluations after every second or third update
SMALL = {"num_envs": 4, "num_steps": 16, "num_minibatches": 4, "update_epochs": 2, "total_timesteps": 384}
SMALL |= {"eval_episodes": 3, "num_evals": 3, "checkpoint_every": 4, "learning_rate": 3e-3, "seed": 5}
TINY = {"num_terms": 2, "ops": "+", "n_embd": 16, "warm_start_steps": 60, "num_prompts": 4, "num_generations": 4}
TINY |= {"num_updates": 4, "num_evals": 4, "eval_problems": 24, "pass_k": 2, "checkpoint_every": 3, "seed": 5}
SETTINGS = {
    "ppo_continuous": SMALL | {"env_id": "toy_envs:DictCounter-v0", "lag": 2},  # flattened, a module of the user's
    "vaco_continuous": SMALL | {"env_id": "Hopper-v5", "num_evals": 2},
    "grpo_llm": TINY,
    "vaco_llm": TINY | {"lag": 1},
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A finished run of each script, by its own process. Nobody writes to them: see `copied`."""
    folder = tmp_path_factory.mktemp("runs")
    for name, settings in SETTINGS.items():
        done = run_script(name, *flags(**settings, run_dir=name), cwd=folder)
        assert done.returncode == 0, done.stderr
    return {name: folder / name for name in SETTINGS}


@pytest.fixture
def copied(runs, tmp_path):
    """copied(name) -> a copy of that run, to be damaged."""
    return lambda name: shutil.copytree(runs[name], tmp_path / name)


@pytest.fixture
def main(monkeypatch, capfd, tmp_path):
    """main(*words) -> (exit code, stdout, stderr) of `python evaluate.py WORDS`, in this process."""

    def main(*words):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words)])
        capfd.readouterr()
        try:
            code = evaluate.main()
        except SystemExit as end:
            code = end.code
        return code or 0, *capfd.readouterr()

    return main


@pytest.fixture
def refuses(main):
    """refuses(words, *parts): exit code 2, nothing on stdout, one line on stderr, with these parts."""

    def refuses(words, *parts: str):
        code, out, err = main(*words)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert [part for part in ("evaluate.py: ", *parts) if part not in err] == []

    return refuses


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def scores(text: str) -> dict[str, float]:
    """The numbers of the first line."""
    return {name: float(x) for name, x in re.findall(r"(\w+) (-?[\d.e-]+)(?:,|$)", text.splitlines()[0].split(": ")[1])}


def change_config(folder: Path, change) -> Path:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# -------------------------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("name", SETTINGS)
def test_a_new_process_gives_the_last_row_of_evals_csv(runs, name, tmp_path):
    before = files(runs[name])
    done = run_script("evaluate", str(runs[name]), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    own = read_csv(runs[name] / "evals.csv")[-1]
    own.pop("global_step" if name in CONTROL else "update")
    assert {key: x for key, x in scores(done.stdout).items() if key in own} == own  # bit for bit: repr and back
    first, second, *more = done.stdout.splitlines()
    assert "(model.pt), seed 5, " in first
    assert first.startswith(f"{SETTINGS[name].get('env_id') or SETTINGS[name].get('task', 'arithmetic')} ")
    assert second == "equal to the run's own evaluation, to the last digit"
    assert bool(more) == (name in LLM)
    assert files(runs[name]) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", SETTINGS)
def test_other_seeds_and_counts_are_not_compared(runs, name, main):
    for words in (("--seed", 6), ("--episodes", 5)):
        code, out, err = main(runs[name], *words)
        assert (code, err) == (0, "")
        assert re.search(r"seed 6, |seed 5, 5 (episodes|problems): ", out)
        assert "own evaluation" not in out
    assert scores(main(runs[name], "--episodes", 5)[1]) == scores(out)


def test_the_numbers_are_those_of_the_policy(runs, main, copied):
    """Another policy gives others, and the comparison says so."""
    folder = copied("vaco_continuous")
    state = torch.load(folder / "model.pt", weights_only=True)
    state["log_std"] += 1
    torch.save(state, folder / "model.pt")
    own = scores(main(runs["vaco_continuous"])[1])
    code, out, _ = main(folder)
    assert code == 0
    assert scores(out)["eval_return"] != own["eval_return"]
    assert f"not equal to the run's own evaluation, {{'eval_return': {own['eval_return']}, 'eval_std'" in out


@pytest.mark.parametrize("name", SETTINGS)
def test_an_unfinished_run_is_evaluated_from_its_checkpoint(copied, name, main):
    """And compared with the evaluation after that update, if there was one."""
    folder, step, update = copied(name), *((256, 4) if name in CONTROL else (3, 3))
    (folder / "model.pt").unlink()
    own = [row for row in read_csv(folder / "evals.csv") if next(iter(row.values())) == step]
    assert bool(own) == (name != "vaco_continuous")
    code, out, err = main(folder)
    assert (code, err) == (0, "")
    assert f"(checkpoint after update {update})" in out
    assert ("equal to the run's own evaluation" in out) == bool(own)
    for row in own:
        assert scores(out).items() >= dict(list(row.items())[1:]).items()


def test_more_episodes_than_the_runs_own_are_played_in_portions(runs, main, monkeypatch):
    """At most 16 environments at once, each portion of other starts; the run's own number is one batch."""
    script, calls = load("ppo_continuous"), []
    monkeypatch.setattr(script, "evaluate", lambda agent, env_id, n, seed: calls.append((n, seed)) or np.ones((2, n)))
    assert main(runs["ppo_continuous"], "--episodes", 40)[0] == 0
    assert [n for n, _ in calls] == [16, 16, 8]
    assert len({seed for _, seed in calls}) == 3
    calls.clear()
    main(runs["ppo_continuous"])
    assert calls == [(3, 5)]


def test_half_a_line_at_the_end_of_the_table_is_left_out(copied, main):
    """As a run leaves it that had no room; the comparison is with the evaluation before."""
    folder = copied("ppo_continuous")
    with open(folder / "evals.csv", "a") as file:
        file.write("448,0.5")
    code, out, err = main(folder)
    assert (code, err) == (0, "")
    assert "equal to the run's own evaluation, to the last digit" in out


# -------------------------------------------------------------------------------------------------- language models


def test_examples_are_shown_with_their_verdict(runs, main):
    """Those that TensorBoard has of the last evaluation."""
    for name in LLM:
        _, out, _ = main(runs[name])
        events = EventAccumulator(str(runs[name])).Reload()
        text = events.Tensors("eval/samples/text_summary")[-1].tensor_proto.string_val[0].decode()
        examples = re.findall(r"^    (\S+) -> '(.*)', reward (\S+)$", text, re.MULTILINE)
        assert len(examples) == 4
        for prompt, completion, reward in examples:
            verdict = r"right" if float(reward) else r"wrong, the answer is \d+"
            assert re.search(rf"^{re.escape(prompt)}  \({verdict}\)\n    {re.escape(completion)}$", out, re.MULTILINE)


def test_a_prompt_of_ones_own(runs, main):
    """The greedy completion, the same as among many prompts."""
    script = load("grpo_llm")
    args = script.Args(**TINY)
    task = script.make_task(args)
    tokenizer = script.CharTokenizer(task.alphabet)
    model = script.new_model(args, task, tokenizer, torch.device("cpu"))
    model.load_state_dict(torch.load(runs["grpo_llm"] / "model.pt", weights_only=True))
    problems = script.sample_problems(task, 5, np.random.default_rng(0), held_out=True)
    _, texts = script.generate(model, task, tokenizer, problems, 1, args)
    for problem, text in zip(problems, texts, strict=True):
        assert main(runs["grpo_llm"], "--prompt", problem.prompt)[:2] == (0, f"{text}\n")


@pytest.mark.parametrize("prompt", ["7?5=", "", "7+5$", "7+5-3=", "1" * 100])
def test_a_prompt_that_cannot_be_read_is_refused(runs, refuses, prompt):
    refuses([runs["grpo_llm"], "--prompt", prompt], "--prompt must be 1 to 4 characters of '0123456789+-=;'")


# ------------------------------------------------------------------------------------------------------------ films


def can_film() -> bool:
    code = "import moviepy, gymnasium as g; e = g.make('Hopper-v5', render_mode='rgb_array'); e.reset(); e.render()"
    return not subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT | {"MUJOCO_GL": "egl"}, capture_output=True
    ).returncode


def test_a_film_of_the_first_episode(copied, tmp_path):
    if not can_film():
        pytest.skip("needs moviepy and EGL")
    from matplotlib.image import imread
    from moviepy import VideoFileClip

    folder, script = copied("vaco_continuous"), load("vaco_continuous")
    before = files(folder)
    state = torch.load(folder / "model.pt", weights_only=True)
    agent = script.Agent(state["obs_rms.mean"].numel(), state["log_std"].numel())
    agent.load_state_dict(state)
    returns, lengths = script.evaluate(agent, "Hopper-v5", 3, seed=5)
    done = run_script("evaluate", str(folder), "--video", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "equal to the run's own evaluation, to the last digit" in done.stdout  # drawing changes nothing
    assert f"first of these episodes, return {returns[0]}, {lengths[0]} steps: {folder / 'video'}\n" in done.stdout
    new = files(folder).keys() - before.keys()
    assert new == {"video/frames.png", "video/seed5-episode-0.mp4"}
    assert {name: x for name, x in files(folder).items() if name not in new} == before
    strip = imread(folder / "video" / "frames.png")
    assert strip.shape[:2] == (480, 8 * 480)
    assert not np.array_equal(strip[:, :480], strip[:, -480:])
    with VideoFileClip(str(folder / "video" / "seed5-episode-0.mp4")) as clip:
        assert abs(clip.n_frames - (lengths[0] + 1)) <= 1  # the reader rounds
    # once more, elsewhere, cut
    code = (
        f"import sys, evaluate; evaluate.LONGEST_FILM = 4; sys.argv[1:] = [{str(folder)!r}, '--video', '--out', 'film']"
    )
    command = [sys.executable, "-c", f"{code}; evaluate.main()"]
    root = str(Path(evaluate.__file__).parent)
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT | {"PYTHONPATH": root}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "its first 4 steps: film\n" in done.stdout
    with VideoFileClip(str(tmp_path / "film" / "seed5-episode-0.mp4")) as clip:
        assert abs(clip.n_frames - 5) <= 1


def test_filming_without_moviepy_is_refused(runs, refuses, monkeypatch):
    monkeypatch.setitem(sys.modules, "moviepy", None)
    refuses([runs["vaco_continuous"], "--video"], "moviepy")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of gymnasium's viewer
def test_filming_what_cannot_be_drawn_is_refused(runs, refuses, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "moviepy", sys)  # it is only asked whether it is there
    refuses([runs["ppo_continuous"], "--video", "--out", tmp_path / "film"], "DictCounter-v0 cannot be drawn here")
    monkeypatch.setenv("MUJOCO_GL", "nothing")  # what the user has set is respected
    refuses([runs["vaco_continuous"], "--video"], "Hopper-v5 cannot be drawn here", "MUJOCO_GL is nothing")
    assert os.environ["MUJOCO_GL"] == "nothing"
    assert not (runs["vaco_continuous"] / "video").exists()


# --------------------------------------------------------------------------------------------------------- refusals


def test_options_that_do_not_fit_are_refused(runs, refuses, tmp_path):
    control, llm = runs["ppo_continuous"], runs["grpo_llm"]
    refuses([tmp_path / "nothing"], "No such file or directory", "config.json")
    refuses([llm, "--video"], "--video is for runs of ppo_continuous and vaco_continuous")
    refuses([control, "--prompt", "7+5="], "--prompt is for runs of grpo_llm and vaco_llm")
    for folder in (control, llm):
        refuses([folder, "--episodes", "0"], "--episodes must lie in 1 .. 100000, not 0")
        refuses([folder, "--seed", "-1"], "--seed must lie in 0 ..", "not -1")
        refuses([folder, "--device", "cuda:99"], "CUDA")
        refuses([folder, "--out", "film"], "--out for --video")
    refuses([llm, "--prompt", "7+5=", "--seed", "1"], "--prompt", "without --episodes and --seed")


def test_a_run_without_evaluations_needs_a_number(copied, refuses, main):
    folder = change_config(copied("ppo_continuous"), lambda config: config["args"].update(eval_episodes=0))
    refuses([folder], "--episodes must lie in 1 .. 100000, not 0")
    assert main(folder, "--episodes", 3)[0] == 0


def write_config(text: str):
    return lambda folder: (folder / "config.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (write_config("{"), "Expecting property name"),
        (write_config('{"script": "os", "args": {}}'), "a run of 'os'"),
        (write_config('{"script": "ppo_continuous", "args": {"flag": 1}}'), "flag"),
        (write_config('{"script": "ppo_continuous", "args": {"gamma": 2}}'), "--gamma must lie in 0 .. 1"),
        (write_config('{"script": "ppo_continuous", "args": {"env_id": "Hopper-v5"}}'), "size mismatch"),
        (lambda folder: os.truncate(folder / "model.pt", 3000), "zip"),
        (lambda folder: torch.save({"x": Path("x")}, folder / "model.pt"), "weights_only"),  # would run code
        (lambda folder: [path.unlink() for path in folder.glob("*.pt")], "checkpoint.pt"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(copied, refuses, damage, part):
    folder = copied("ppo_continuous")
    damage(folder)
    refuses([folder], part)


def test_a_policy_that_is_not_finite_fails(copied, main):
    folder = copied("vaco_continuous")
    state = torch.load(folder / "model.pt", weights_only=True)
    state["log_std"] += torch.nan
    torch.save(state, folder / "model.pt")
    assert main(folder)[0] == "evaluate.py: returns not finite"  # what sys.exit prints, with exit code 1
