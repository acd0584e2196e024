"""The scripts as texts: copies agree, `diff` and the scripts stay short, nothing is left over, import is silent."""

import ast
import dataclasses
import difflib
import io
import itertools
import re
import subprocess
import sys
import tokenize
import tomllib

import pytest
from helpers import ENVIRONMENT, ROOT, load

# ------------------------------------------------------------------- a new script is added here

CONTROL, LLM = ("ppo_continuous", "vaco_continuous"), ("grpo_llm", "vaco_llm")
SCRIPTS = CONTROL + LLM
PAIRS = {CONTROL: 100, LLM: 100}  # read side by side: most lines that `diff` marks with < or >
SIZES = {  # most lines, and most characters of code
    "ppo_continuous": (650, 26_000),
    "vaco_continuous": (690, 27_500),
    "grpo_llm": (850, 35_000),
    "vaco_llm": (880, 36_000),
}
MEANT_TO_DIFFER = {CONTROL: {"Args", "check", "policy_loss", "train"}, LLM: {"Args", "check", "policy_loss"}}
# batches of completions instead of steps of environments
ACROSS = {"main", "Args", "check", "policy_loss", "train", "rollout", "gradient_step", "update", "evaluate", "metrics"}
MEANT_TO_DIFFER |= {pair: ACROSS | {"restore"} for pair in itertools.product(CONTROL, LLM)}
MEANT_TO_DIFFER["vaco_continuous", "vaco_llm"] |= {"tv_filter"}

# ----------------------------------------------------------------------------------------------

OPTIONAL = {"wandb", "tensorboard", "torch.utils.tensorboard", "matplotlib", "transformers"}
each_script = pytest.mark.parametrize("name", SCRIPTS)


def source(name: str) -> str:
    return (ROOT / f"{name}.py").read_text()


def definitions(name: str) -> dict[str, str]:
    """Source of every top-level function, class and constant, with decorators."""
    lines, found = source(name).splitlines(), {}
    for node in ast.parse(source(name)).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in ast.walk(node):
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                    found[target.id] = ast.get_source_segment(source(name), node)
    return found


@pytest.mark.parametrize("pair", list(itertools.combinations(SCRIPTS, 2)), ids="-".join)
def test_same_name_means_same_source(pair):
    a, b = map(definitions, pair)
    assert {name for name in a.keys() & b.keys() if a[name] != b[name]} == MEANT_TO_DIFFER.get(pair, set())


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_the_diff_of_a_pair_is_short(pair):
    """diff A B | grep -c '^[<>]'"""
    paths = [ROOT / f"{name}.py" for name in pair]
    try:
        diff = subprocess.run(["diff", *paths], capture_output=True, text=True).stdout.splitlines()
        changed = [line for line in diff if line.startswith(("<", ">"))]
    except FileNotFoundError:  # no diff here
        diff = difflib.ndiff(*(path.read_text().splitlines() for path in paths))
        changed = [line for line in diff if line.startswith(("- ", "+ "))]
    assert 0 < len(changed) <= PAIRS[pair]


@each_script
def test_a_script_has_a_size_that_can_be_read(name):
    """Of code are counted: lines that are not blank, no comment and no docstring, each without its indentation."""
    lines, rest = source(name).splitlines(), set()
    for node in ast.walk(ast.parse(source(name))):
        body = getattr(node, "body", None)
        for x in body if isinstance(body, list) else []:
            if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant) and isinstance(x.value.value, str):
                rest |= {*range(x.lineno, x.end_lineno + 1)}
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno + 1 <= 110, node.name
    code = [line.strip() for i, line in enumerate(lines, 1) if i not in rest and not line.strip().startswith("#")]
    most_lines, most_characters = SIZES[name]
    assert len(lines) <= most_lines
    assert sum(map(len, code)) <= most_characters


@each_script
def test_sections_have_one_order(name):
    first = "environments and networks" if name in CONTROL else "tasks and networks"
    assert re.findall(r"^# -{10,} (.+)$", source(name), re.MULTILINE) == [
        first,
        "lag simulator",
        "advantages and losses",
        "rollout, update, evaluation, train",
        "files of a run",
    ]


# ---------------------------------------------------------------------------------------------------------- import


def test_import_is_silent_and_leaves_optional_packages_alone(tmp_path):
    """From another folder, as in a stranger's project."""
    code = f"""
import importlib, sys
for name in {SCRIPTS}:
    importlib.import_module(name)
    if found := {OPTIONAL} & sys.modules.keys():
        sys.exit(f"{{name}} imports {{found}}")
"""
    env = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr.strip()) == ("", "")
    assert list(tmp_path.iterdir()) == []


@each_script
def test_a_script_only_defines(name):
    """Besides imports, definitions and constants there is the last line: if __name__ == "__main__"."""
    first, *body, last = ast.parse(source(name)).body
    assert isinstance(first, ast.Expr)
    assert isinstance(first.value, ast.Constant)
    kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    constants = [node for node in body if not isinstance(node, kinds)]
    assert all(isinstance(node, ast.Assign) for node in constants)
    assert not any(isinstance(x, ast.Call) for node in constants for x in ast.walk(node))
    assert ast.unparse(last).startswith("if __name__ == '__main__':\n")
    assert len(last.body) == 1


@each_script
def test_a_script_imports_nothing_of_this_project(name):
    ours = {path.stem for path in ROOT.glob("*.py")} | {"benchmark", "tests"}
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & ours
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert node.module.split(".")[0] not in ours


# ------------------------------------------------------------------------------------------------------- arguments


def fields(name: str) -> dict[str, str]:
    """The comment behind each field of Args, empty where it has none."""
    (args,) = [x for x in ast.parse(source(name)).body if isinstance(x, ast.ClassDef) and x.name == "Args"]
    tokens = tokenize.generate_tokens(io.StringIO(source(name)).readline)
    comments = {x.start[0]: x.string.removeprefix("#").strip() for x in tokens if x.type == tokenize.COMMENT}
    return {x.target.id: comments.get(x.end_lineno, "") for x in args.body if isinstance(x, ast.AnnAssign)}


@each_script
def test_every_field_is_read(name):
    """As args.FIELD, or as self.FIELD inside Args."""
    tree, read = ast.parse(source(name)), set()
    (args,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    for scope, owner in ((tree, "args"), (args, "self")):
        for node in ast.walk(scope):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                on = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", None)
                read |= {node.attr} if on == owner else set()
    assert fields(name).keys() - read == set()


@each_script
def test_help_shows_every_flag_and_the_comment_behind_its_field(name, monkeypatch, capsys):
    assert {field.name for field in dataclasses.fields(load(name).Args)} == fields(name).keys()
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as end:
        load(name).main()
    assert not end.value.code
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for field, comment in fields(name).items():
        assert len(comment) >= 10, field
        assert f"--{field.replace('_', '-')}" in text
        assert " ".join(comment.split()) in text, field


# -------------------------------------------------------------------------------------------------------- packages


def pins(lines) -> dict[str, str]:
    """{"torch": "2.13.0"} of lines such as torch==2.13.0"""
    return dict(line.split("==") for line in (line.split("#")[0].strip() for line in lines) if line)


@each_script
def test_inline_metadata_equals_the_pins(name):
    """`uv run ppo_continuous.py` gets the versions of requirements.txt."""
    (block,) = re.findall(r"^# /// script\n((?:#.*\n)+?)# ///$", source(name), re.MULTILINE)
    metadata = tomllib.loads("\n".join(line.removeprefix("#").removeprefix(" ") for line in block.splitlines()))
    required = pins((ROOT / "requirements.txt").read_text().splitlines())
    assert metadata["requires-python"] == ">=3.11"
    inline = pins(metadata["dependencies"])
    assert {package: required.get(package) for package in inline} == inline
    distributions = {"torch", "numpy", "tyro", "tensorboard"} | ({"gymnasium", "mujoco"} if name in CONTROL else set())
    assert {re.sub(r"\[.*\]", "", package) for package in inline} == distributions


def test_every_script_at_the_top_is_tested():
    algorithms = {path.stem for path in ROOT.glob("*_continuous.py")} | {path.stem for path in ROOT.glob("*_llm.py")}
    assert algorithms == set(SCRIPTS)
