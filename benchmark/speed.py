"""How fast the scripts are beside other implementations, as ratios measured in one go: `python -m benchmark speed`.

Each contestant is a process of its own, one at a time, with one thread. A repeat goes through all of them once, so that
whatever else the machine does hits all alike; a ratio is taken within a repeat, and its median over repeats reported.
"""

import csv
import io
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

from benchmark.report import table
from benchmark.runner import kill, last_words, launch, origin, peak_mb, typed, wait
from benchmark.runs import ROOT, Refused, flag_list, replace_file, slug

CONTROL = {"env-id": "HalfCheetah-v5", "num-envs": 16, "num-steps": 128, "num-minibatches": 32, "update-epochs": 10}
CONTROL |= {"eval-episodes": 0}
# Few gradient steps, since only memory is asked for; lag 63 has all its policies after 64 iterations.
MEMORY = CONTROL | {"num-minibatches": 4, "update-epochs": 1, "total-timesteps": 70 * 2048, "compile": False}
# Five terms: worked solutions are 16 tokens at most. Hardly a warm start, so that completions are as long as those of a
# random model, and no longer skipped for lack of any reward; and hardly a step, so that they stay so.
LLM = {"num-terms": 5, "max-new-tokens": 16, "num-prompts": 16, "num-generations": 8, "learning-rate": 1e-5}
LLM |= {"eval-problems": 0, "num-evals": 0, "warm-start-steps": 25, "warm-start-dir": "warm_start"}
WARMUP = {"control": 3, "llm": 10, "memory": 3}  # iterations before the measured ones
FACTOR = {"trl": 4, "environment": 5, "async_environment": 5, "physics": 5}  # of --iterations, where one is short
ENVIRONMENT = {"MKL_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "COLUMNS": "200", "PYTHONSAFEPATH": "1"}
ENVIRONMENT |= {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}
ENVIRONMENT |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

TITLES = {
    "control": "HalfCheetah-v5: 10 epochs of minibatches of 64 per 2048 steps, nets 64-64",
    "llm": "language model of 0.23 M parameters: 16 prompts x 8 completions, up to 16 tokens, one gradient step each",
    "memory": "peak memory: 70 iterations of 2048 steps, 16 environments",
}
PEERS = {"sb3": "SB3 PPO", "sbx": "sbx PPO", "cleanrl": "CleanRL PPO", "trl": "TRL GRPO"}  # of peers.py
ALONE = {"environment": "bare environment", "async_environment": "AsyncVectorEnv", "physics": "physics alone"}
COLUMNS = ("table", "contestant", "repeat", "steps_per_second", "warmup_seconds", "sampling_share", "cpu_share")
COLUMNS += ("peak_rss_mb", "versions", "machine", "commit", "command")
NOTES = """- x NAME: speed as a multiple of NAME's, within a repeat; the median over repeats
- CPU: processor time of the process over its wall time; well below 100 % other work kept it waiting
- warm-up: seconds outside the measurement (start, imports, compilation, first iterations), repeat 1
- peak memory: resident, of the process or of the largest that it started"""


@dataclass(frozen=True)
class Contestant:
    table: str
    name: str
    script: str  # relative to this repository
    words: list
    python: str = sys.executable
    unit: int | None = None  # steps or completions per global_step of metrics.csv; None: it prints its result
    lag_0: str | None = None  # name of the same contestant without lag


@dataclass
class Speed:
    """Measure the speed of the scripts beside other implementations."""

    out: Path  # folder of speed.csv and speed.md
    only: Literal["control", "llm", "memory"] | None = None  # one table
    match: str = ""  # only contestants whose name matches this regular expression, as 'PPO|bare'
    repeats: int = 3  # times all are measured
    iterations: int = 8  # measured iterations
    peers: Path | None = None  # python that has speed_requirements.txt
    cleanrl: Path | None = None  # a copy of CleanRL's ppo_continuous_action.py

    def do(self):
        """Measure all, writing speed.csv and speed.md after each. Returns 0, or 1 if something failed."""
        contestants, rows, failures = self.enlist(), [], {}
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        self.out.mkdir(parents=True, exist_ok=True)
        if not self.peers:
            print("without --peers only our scripts, the bare environment and physics: see docs/speed.md", flush=True)
        turns = [(r, c) for r in range(1, self.repeats + 1) for c in contestants if r == 1 or c.table != "memory"]
        with tempfile.TemporaryDirectory() as scratch:
            scratch = Path(scratch)
            if self.cleanrl:
                shutil.copy(self.cleanrl, scratch / "cleanrl.py")
            for turn, (repeat, contestant) in enumerate(turns, 1):
                try:
                    row = {"table": contestant.table, "contestant": contestant.name, "repeat": repeat}
                    rows.append(row | measure(contestant, scratch))
                    said = "{steps_per_second:,.0f} per s, warm-up {warmup_seconds:.0f} s, {peak_rss_mb:.0f} MB"
                    said = said.format(**rows[-1])
                except Refused as failure:
                    failures[contestant.name], said = str(failure), f"failed: {failure}"
                    shutil.copy(scratch / "log", self.out / f"{slug(contestant.name)}.log")
                tables = write_files(self.out, contestants, rows, failures)
                print(f"{turn}/{len(turns)} {contestant.name}, repeat {repeat}: {said}", flush=True)
        print(f"\n{tables}\n\nwritten: {self.out}/speed.md, {self.out}/speed.csv")
        return 1 if failures else 0

    def enlist(self):
        """The contestants, in the order in which a repeat measures them. Raises Refused."""
        if min(self.repeats, self.iterations) < 1:
            raise Refused("--repeats and --iterations must be at least 1")
        if self.peers and not os.access(self.peers, os.X_OK):
            raise Refused(f"--peers {self.peers} is no program: give the python of the environment that has the peers")
        if self.cleanrl and not (self.peers and self.cleanrl.is_file()):
            raise Refused("--cleanrl needs a copy of CleanRL's ppo_continuous_action.py, and --peers PYTHON to run it")
        if (self.out / "speed.csv").exists():
            raise Refused(f"{self.out} holds a speed.csv already: move it or choose another --out")
        found, peers = [], [name for name in PEERS if self.peers and (name != "cleanrl" or self.cleanrl)]
        for name, compiled, lag in product(("PPO", "VACO"), (False, True), (0, 63)):
            suffix, steps = ", --compile" * compiled, 2048 * (WARMUP["control"] + self.iterations)
            flags = CONTROL | {"total-timesteps": steps, "lag": lag, "compile": compiled}
            words, lag_0 = flag_list(flags), f"{name}, lag 0{suffix}" if lag else None
            script = f"{name.lower()}_continuous.py"
            found.append(Contestant("control", f"{name}, lag {lag}{suffix}", script, words, unit=1, lag_0=lag_0))
        found += [self.other("control", name) for name in (*peers, *ALONE) if name != "trl"]
        words = flag_list(LLM | {"num-updates": WARMUP["llm"] + FACTOR["trl"] * self.iterations})
        for name in ("GRPO", "VACO"):
            found.append(Contestant("llm", f"{name} LLM, lag 0", f"{name.lower()}_llm.py", words, unit=16 * 8))
        found += [self.other("llm", name) for name in peers if name == "trl"]
        for env_id, lag in (("HalfCheetah-v5", 0), ("Humanoid-v5", 63)):
            words = flag_list(MEMORY | {"env-id": env_id, "lag": lag})
            found.append(Contestant("memory", f"VACO {env_id}, lag {lag}", "vaco_continuous.py", words, unit=1))
        found = [c for c in found if self.only in (None, c.table) and re.search(self.match, c.name)]
        if not found:
            raise Refused(f"--match {self.match} matches the name of no contestant")
        return found

    def other(self, table, name):
        """One of peers.py, in the peers' environment unless it needs nothing that ours lacks."""
        words = [name, str(WARMUP[table]), str(FACTOR.get(name, 1) * self.iterations)]
        words += ["../cleanrl.py"] if name == "cleanrl" else []
        python = sys.executable if name in ALONE else str(self.peers.absolute())
        return Contestant(table, (PEERS | ALONE)[name], "benchmark/peers.py", words, python)


# -------------------------------------------------------------------------------------------------------- measurement


def measure(contestant, scratch):
    """Run a contestant once. Returns the columns of speed.csv that it decides; raises Refused with its last line."""
    for folder in ("run", "cwd"):
        shutil.rmtree(scratch / folder, ignore_errors=True)
    (scratch / "cwd").mkdir()
    command = [contestant.python, str(ROOT / contestant.script), *contestant.words]
    command += ["--run-dir", str(scratch / "run")] if contestant.unit else []
    compiled = {"TORCHINDUCTOR_CACHE_DIR": str(scratch / f"compiled-{slug(contestant.name)}")}  # empty at first
    started = time.perf_counter()
    with open(scratch / "log", "w") as log:
        process = launch(command, log, ENVIRONMENT | compiled, cwd=scratch / "cwd")
    try:
        usage = wait(process)
    except BaseException:  # Ctrl-C
        kill(process)
        raise
    wall, output = time.perf_counter() - started, (scratch / "log").read_text(errors="replace")
    if process.returncode:
        raise Refused(f"exit code {process.returncode}: {last_words(output)}")
    made = origin()
    if contestant.unit:
        made |= read_run(contestant, scratch / "run")
    else:
        made |= json.loads([line for line in output.splitlines() if line.startswith('{"steps"')][-1])
    return {
        "steps_per_second": made["steps"] / made["seconds"],
        "warmup_seconds": wall - made["seconds"],  # start, imports, compilation, the first iterations
        "sampling_share": made["sampling_share"],
        "cpu_share": (usage.ru_utime + usage.ru_stime) / wall,
        "peak_rss_mb": peak_mb(usage),
        "versions": ", ".join(f"{package} {x}" for package, x in made["versions"].items()),
        "machine": made["machine"],
        "commit": made["commit"] or "unknown",
        "command": shlex.join(["python", contestant.script, *contestant.words]),
    }


def read_run(contestant, folder):
    """Steps and seconds of one of our runs from the end of the warm-up on, and the share of sampling if it has one."""
    with open(folder / "metrics.csv", newline="") as file:
        rows = [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]
    first, *measured = rows[WARMUP[contestant.table] - 1 :]
    seconds, steps = (measured[-1][key] - first[key] for key in ("charts/seconds", "global_step"))
    keys = ("charts/skipped_steps", "charts/sampling_seconds", "charts/training_seconds")
    skipped, sampling, training = (sum(row.get(key, 0) for row in measured) for key in keys)
    if skipped > 0.1 * len(measured):
        raise Refused(
            f"{skipped:.0f} of {len(measured)} updates had no reward to learn from, so its speed says nothing"
        )
    share = sampling / (sampling + training) if training else None
    return {"steps": steps * contestant.unit, "seconds": seconds, "sampling_share": share}


# ------------------------------------------------------------------------------------------------------------- tables


def write_files(out, contestants, rows, failures):
    """speed.csv and speed.md of what is measured so far. Returns the tables."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_file(out / "speed.csv", text.getvalue())
    parts = [speed_table(name, [c for c in contestants if c.table == name], rows) for name in TITLES]
    if failures:
        parts.append("**Failed:**\n\n" + "\n".join(f"- {name}: {reason}" for name, reason in failures.items()))
    tables, lines = "\n\n".join(part for part in parts if part), [f"- command: `{typed()}`"]
    lines += [f"- {key}: {' and '.join(dict.fromkeys(row[key] for row in rows))}" for key in ("commit", "machine")]
    for versions in dict.fromkeys(row["versions"] for row in rows):
        names = dict.fromkeys(row["contestant"] for row in rows if row["versions"] == versions)
        lines.append(f"- {'; '.join(names)}: {versions}")
    header = "\n".join(lines)
    replace_file(out / "speed.md", f"# Speed\n\n{header}\n{NOTES}\n\n{tables}\n")
    return tables


def speed_table(name, contestants, rows):
    if not contestants:
        return None
    found = {c.name: {r["repeat"]: r for r in rows if r["contestant"] == c.name} for c in contestants}
    references = [x for x in (*PEERS.values(), "bare environment") if x in found]
    means = [("CPU", "cpu_share", ".0%"), ("warm-up, s", "warmup_seconds", ",.0f")]
    means = [
        *[("sampling", "sampling_share", ".0%")] * (name == "llm"),
        *means,
        ("peak memory, MB", "peak_rss_mb", ",.0f"),
    ]
    lags, unit = any(c.lag_0 for c in contestants), "completions/s" if name == "llm" else "steps/s"
    lines = [["", f"{unit}, median", "min to max", *(f"x {x}" for x in references), *["x lag 0"] * lags]]
    lines[0] += [title for title, _, _ in means]
    for contestant in contestants:
        mine = found[contestant.name]
        speeds = {r: row["steps_per_second"] for r, row in mine.items()}
        line = [contestant.name, median(speeds.values(), ",.0f")]
        line.append(f"{min(speeds.values()):,.0f} to {max(speeds.values()):,.0f}" if speeds else "")
        for reference in [*references, *[contestant.lag_0] * lags]:
            other = found.get(reference, {})
            line.append(median([x / other[r]["steps_per_second"] for r, x in speeds.items() if r in other], ".2f"))
        for _, key, form in means:  # only the first one has to compile
            line.append(median([row[key] for row in mine.values()][: 1 if key == "warmup_seconds" else None], form))
        lines.append(line)
    return f"## {TITLES[name]}\n\n{table(lines)}"


def median(values, form):
    return format(statistics.median(values), form) if values else ""
