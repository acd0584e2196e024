import sys
import traceback

import pytest
import torch
from helpers import CONTROL, load


@pytest.fixture(params=CONTROL)
def script(request):
    """Each of the control scripts, as a module."""
    return load(request.param)


@pytest.fixture
def ppo():
    return load("ppo_continuous")


@pytest.fixture
def vaco():
    return load("vaco_continuous")


@pytest.fixture(autouse=True)
def seeded():
    """Random tensors of a test are the same every time."""
    torch.manual_seed(0)


@pytest.fixture
def main(monkeypatch, capfd, tmp_path):
    """main(script, *words) -> (exit code, stdout, stderr) of `python SCRIPT.py WORDS`, in the folder tmp_path/cwd. In
    this process: that saves the seconds of importing torch."""

    def main(script, *words) -> tuple[int, str, str]:
        (tmp_path / "cwd").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "cwd")
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, words)])
        capfd.readouterr()
        try:
            code = script.main() or 0
        except SystemExit as end:
            code = end.code or 0
        except Exception:  # what the interpreter would do
            traceback.print_exc()
            code = 1
        return code, *capfd.readouterr()

    return main


@pytest.fixture
def stopped(monkeypatch, main):
    """stopped(script, updates, *words): such a run, stopped by an error in the update after so many."""

    def stopped(script, updates: int, *words) -> None:
        metrics, rows = script.metrics, []

        def counted(*args):
            rows.append(None)
            if len(rows) > updates:
                raise RuntimeError("stopped")
            return metrics(*args)

        with monkeypatch.context() as patch:
            patch.setattr(script, "metrics", counted)
            code, _, err = main(script, *words)
        assert (code, err.splitlines()[-1]) == (1, "RuntimeError: stopped")

    return stopped
