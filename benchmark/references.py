"""reference_scores.csv: the 0 and 1 of normalised scores, of a task after a number of steps."""

import csv
from pathlib import Path

import numpy as np
from tyro.conf import Positional

from benchmark.results import PACKAGES, PATH, load
from benchmark.runs import Refused, csv_text, replace_file

EPISODES = 100  # of the random policy
COLUMNS = ("task", "steps", "final_step", "random", "ppo", "ppo_std", "episodes", "seeds", "commit")
COLUMNS += (*PACKAGES, "command")


def write_references(out: Positional[Path], algorithm: str, path: Path = PATH):
    """Make the 0 and 1 of normalised scores: the mean return of a random policy, and of an algorithm at lag 0 in a
    folder of runs, for each task of which all its seeds are finished."""
    old = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
    if any(row.keys() != set(COLUMNS) for row in old):
        raise Refused(f"{path} is not a file of reference scores; its columns are {', '.join(COLUMNS)}")
    kept, lines = {(row["task"], row["final_step"]): row for row in old}, []
    _, suite, rows = load(out)
    for task in suite.tasks:
        found = [r for r in rows if (r["task"], r["algorithm"], r["lag"]) == (task, algorithm, 0)]
        returns = [row["eval_return"] for row in found if row["eval_return"] is not None]
        if not returns or len(returns) < len(found):
            lines.append(f"{task}: no reference, {len(returns)} of {len(found)} runs at lag 0 have a return")
            continue
        random, ppo, last = random_return(task), float(np.mean(returns)), int(found[0]["final_step"])
        row = {"task": task, "steps": suite.settings.get("total-timesteps", last), "final_step": last, "random": random}
        row |= {"ppo": ppo, "ppo_std": float(np.std(returns, ddof=1)) if len(returns) > 1 else ""}
        row |= {"episodes": EPISODES, "seeds": " ".join(str(r["seed"]) for r in found), "command": found[0]["command"]}
        row |= {k: " and ".join(dict.fromkeys(r[k] or "unknown" for r in found)) for k in ("commit", *PACKAGES)}
        kept[task, str(last)] = row
        lines.append(f"{task}, {last:,} steps: random {random:.1f}, {algorithm} {ppo:.1f} ({len(returns)} seeds)")
    ordered = [kept[key] for key in sorted(kept, key=lambda key: (key[0], int(key[1])))]
    replace_file(path, csv_text(COLUMNS, ordered))
    return "\n".join([*lines, f"written: {path}"])


def random_return(task, seed=0):
    """Mean return of episodes with actions drawn uniformly within their bounds, which must be finite."""
    import gymnasium as gym
    import mujoco

    mujoco.set_mju_user_warning(lambda text: None)  # else it writes MUJOCO_LOG.TXT into the working directory
    env, returns = gym.make(task), []
    if not np.isfinite([env.action_space.low, env.action_space.high]).all():
        raise Refused(f"{task}: a random policy needs actions with bounds, not {env.action_space}")
    env.action_space.seed(seed)
    for start in np.random.SeedSequence(seed).generate_state(EPISODES).tolist():
        env.reset(seed=start)
        done, total = False, 0.0
        while not done:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            done, total = terminated or truncated, total + reward
        returns.append(total)
    return float(np.mean(returns))
