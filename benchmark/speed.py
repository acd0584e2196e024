"""How fast the scripts are beside other implementations, as ratios measured in one go: `python -m benchmark speed`.

Each contestant is a process of its own, one at a time, with one thread. A repeat goes through all of them once, so that
whatever else the machine does hits all alike; a ratio is taken within a repeat, and its median over repeats reported.
"""

import csv
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

from benchmark.report import table
from benchmark.runner import kill, last_words, launch, origin, peak_mb, typed, wait
from benchmark.runs import ROOT, Refused, csv_text, flag_list, replace_file, slug

SETTINGS = {"env-id": "HalfCheetah-v5", "num-envs": 16, "num-steps": 128, "num-minibatches": 32, "update-epochs": 10}
SETTINGS |= {"eval-episodes": 0}
BATCH_SIZE, WARMUP = 2048, 3  # steps of an iteration; iterations before the measured ones
PEERS = {"sb3": "SB3 PPO", "sbx": "sbx PPO", "cleanrl": "CleanRL PPO"}
NAMES = PEERS | {"environment": "bare environment"}  # functions of peers.py
ENVIRONMENT = {"MKL_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "COLUMNS": "200", "PYTHONSAFEPATH": "1"}
ENVIRONMENT |= {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}
COLUMNS = ("contestant", "repeat", "steps_per_second", "warmup_seconds", "cpu_share", "peak_rss_mb", "versions")
COLUMNS += ("machine", "commit", "command")


@dataclass(frozen=True)
class Contestant:
    name: str
    script: str  # relative to this repository
    words: list
    python: str = sys.executable


@dataclass
class Speed:
    """Measure the speed of the scripts beside other implementations."""

    out: Path  # folder of speed.csv and speed.md
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
        turns = list(product(range(1, self.repeats + 1), contestants))
        with tempfile.TemporaryDirectory() as scratch:
            scratch = Path(scratch)
            if self.cleanrl:
                shutil.copy(self.cleanrl, scratch / "cleanrl.py")
            for turn, (repeat, contestant) in enumerate(turns, 1):
                try:
                    row = {"contestant": contestant.name, "repeat": repeat} | measure(contestant, scratch)
                    rows.append(row)
                    said = f"{row['steps_per_second']:,.0f} steps/s, warm-up {row['warmup_seconds']:.0f} s"
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
        found, steps = [], BATCH_SIZE * (WARMUP + self.iterations)
        for name, compiled, lag in product(("PPO", "VACO"), (False, True), (0, 63)):
            words = flag_list(SETTINGS | {"total-timesteps": steps, "lag": lag, "compile": compiled})
            title = f"{name}, lag {lag}{', --compile' * compiled}"
            found.append(Contestant(title, f"{name.lower()}_continuous.py", words))
        peers = [name for name in PEERS if self.peers and (name != "cleanrl" or self.cleanrl)]
        for name in (*peers, "environment"):
            words, python = [name, str(WARMUP), str(self.iterations)], self.peers
            if name == "environment":  # an iteration is short
                words, python = [name, str(WARMUP), str(5 * self.iterations)], Path(sys.executable)
            words += ["../cleanrl.py"] if name == "cleanrl" else []
            found.append(Contestant(NAMES[name], "benchmark/peers.py", words, str(python.absolute())))
        if not (matching := [c for c in found if re.search(self.match, c.name)]):
            raise Refused(f"--match {self.match} matches the name of no contestant: {'; '.join(c.name for c in found)}")
        return matching


def measure(contestant, scratch):
    """Run a contestant once. Returns the columns of speed.csv that it decides; raises Refused with its last line."""
    for folder in ("run", "cwd"):
        shutil.rmtree(scratch / folder, ignore_errors=True)
    (scratch / "cwd").mkdir()
    command = [contestant.python, str(ROOT / contestant.script), *contestant.words]
    ours = "continuous" in contestant.script
    command += ["--run-dir", str(scratch / "run")] if ours else []
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
    if ours:  # from the end of the warm-up on
        with open(scratch / "run/metrics.csv", newline="") as file:
            first, *_, last = list(csv.DictReader(file))[WARMUP - 1 :]
        names = {"steps": "global_step", "seconds": "charts/seconds"}
        made |= {name: float(last[column]) - float(first[column]) for name, column in names.items()}
    else:
        made |= json.loads([line for line in output.splitlines() if line.startswith('{"steps"')][-1])
    return {
        "steps_per_second": made["steps"] / made["seconds"],
        "warmup_seconds": wall - made["seconds"],  # start, imports, compilation, the first iterations
        "cpu_share": (usage.ru_utime + usage.ru_stime) / wall,
        "peak_rss_mb": peak_mb(usage),
        "versions": ", ".join(f"{package} {x}" for package, x in made["versions"].items()),
        "machine": made["machine"],
        "commit": made["commit"] or "unknown",
        "command": shlex.join(["python", contestant.script, *contestant.words]),
    }


def write_files(out, contestants, rows, failures):
    """speed.csv and speed.md of what is measured so far. Returns the table and the failures."""
    replace_file(out / "speed.csv", csv_text(COLUMNS, rows))
    text = speed_table([c.name for c in contestants], rows)
    if failures:
        text += "\n\n**Failed:**\n\n" + "\n".join(f"- {name}: {reason}" for name, reason in failures.items())
    replace_file(out / "speed.md", f"# Speed\n\nCommand: `{typed()}`\n\n{text}\n")
    return text


def speed_table(names, rows):
    found = {name: {row["repeat"]: row for row in rows if row["contestant"] == name} for name in names}
    references = [x for x in NAMES.values() if x in found]
    means = [("CPU", "cpu_share", ".0%"), ("warm-up, s", "warmup_seconds", ",.0f"), ("MB", "peak_rss_mb", ",.0f")]
    lines = [["", "steps/s, median", "min to max", *(f"x {x}" for x in references), *(title for title, *_ in means)]]
    for name, mine in found.items():
        speeds = {repeat: row["steps_per_second"] for repeat, row in mine.items()}
        line = [name, median(speeds.values(), ",.0f")]
        line.append(f"{min(speeds.values()):,.0f} to {max(speeds.values()):,.0f}" if speeds else "")
        for other in (found[reference] for reference in references):
            line.append(median([x / other[r]["steps_per_second"] for r, x in speeds.items() if r in other], ".2f"))
        for _, key, form in means:  # only the first one has to compile
            line.append(median([row[key] for row in mine.values()][: 1 if key == "warmup_seconds" else None], form))
        lines.append(line)
    return table(lines)


def median(values, form):
    return format(statistics.median(values), form) if values else ""
