"""The rules of the house, read from the source: who may import whom, one door each, and what a file may hold."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 450

# The parts of megarl that each part may import besides itself. A name with a dot is one module of a part.
MAY_IMPORT: dict[str, set[str]] = {
    "algo": set(),
    "records": set(),
    "device": set(),
    "user_code": set(),
    "ops": {"device", "records", "algo"},
    "parallel": {"device", "records"},
    "models": {"device", "records", "parallel", "ops"},
    "weights": {"device", "records", "models.layout", "parallel.topology", "ops"},
    "rollout": {"device", "records", "obs", "parallel.topology", "parallel.transfer", "weights", "user_code"},
    "reward": {"device", "records", "obs", "user_code"},
    "obs": {"device", "records"},
    "config": {"device", "records", "parallel.topology", "parallel.partition", "algo.algorithms"},
    "trainer": {"device", "records", "models", "parallel", "weights", "ops", "algo", "obs", "config.schema"},
    "launch": {"device", "records", "obs", "trainer", "rollout", "reward", "weights", "config"},
}
# The program itself, above all parts.
TOP = {
    "api",
    "api_config",
    "train",
    "learn",
    "residents",
    "parity",
    "keeper",
    "experience",
    "train_preference",
    "job",
    "job_data",
    "plan",
    "reshard_table",
    "convert",
    "convert_check",
    "validation",
    "judging",
    "drawn",
    "generation",
    "report",
    "cli",
    "__main__",
    "__init__",
}
TOP_FILES = {"trainer/main_ppo.py"}  # a program, in the place where users of verl look for it

# name -> the only files that may name it in code
DOORS: dict[str, set[str]] = {
    "omegaconf": {"config/load.py"},
    "huggingface_hub": {"config/hub.py"},
    "torch.cuda": {"device.py"},
    "httpx2": {"reward/remote.py"},
    "vllm": {"rollout/vllm_engine.py", "weights/vllm_sync.py"},
    "megatron.core.transformer.transformer_config.TransformerConfig": {"models/build.py"},
    "megatron.core.transformer.TransformerConfig": {"models/build.py"},
}
WITHOUT_MEGATRON = {"algo", "ops", "config", "rollout", "reward", "obs", "launch", "records"}
PURE = re.compile(
    r"algo/.*|models/layout\.py|weights/(plan|blocks|patches|shapes|rounds|order)\.py"
    r"|parallel/(topology|partition|schedule|costs"
    r"|bounds|policy|list_schedule|generators|checker|simulate|picker|transfer_plan)\.py"
)
IMPURE = {"torch.distributed", "os", "time", "socket", "subprocess", "megarl.device"}
STANDARD_AND_TORCH = re.compile(
    r"torch(\.|$)|megarl(\.|$)|__future__|math|dataclasses|typing|collections|enum|itertools"
)

# Written in two pieces, so that this file does not name them.
FORBIDDEN_TEXT = {
    "a package registry's host": re.compile(
        r"py" r"pi\.org|python" r"hosted|npm" r"js\.(org|com)|download\.py" r"torch"
    ),
    "a folder of somebody's machine": re.compile(r"/wo" r"rk/|/ro" r"ot/|/ho" r"me/\w|/opt/(whe" r"els|py" r"pi)"),
}
TEXT_FILES = {".py", ".md", ".txt", ".toml", ".yaml", ".sh", ".cpp", ".cu", ".h", ".cuh", ".sbatch", ""}
TEXT_FOLDERS = ("megarl", "tests", "examples", "docs", "requirements", "benchmarks", "csrc", ".ci")


def list_sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def in_package(path: Path) -> str:
    """`models/build.py` for that file of megarl."""
    return path.relative_to(ROOT / "megarl").as_posix()


def read_imports(source: str) -> set[str]:
    """Every module or name imported anywhere in `source`, in full; relative imports begin with a dot."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return found


def read_dotted_names(source: str) -> set[str]:
    """Every `a.b.c` read in code, with all its beginnings."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return found


def begins_with(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def find_wrong_imports(file: str, source: str) -> list[str]:
    """Imports of megarl's own parts that `MAY_IMPORT` does not allow to `file` (as `in_package` names it)."""
    part = file.split("/")[0].removesuffix(".py")
    if part in TOP or file in TOP_FILES:
        return []
    assert part in MAY_IMPORT, f"megarl/{part} is not in MAY_IMPORT: say what it may import"
    allowed = MAY_IMPORT[part] | {part}
    wrong = [name for name in read_imports(source) if name.startswith(".")]
    for name in read_imports(source):
        inner = name.removeprefix("megarl.")
        if inner != name and not any(begins_with(inner, each) for each in allowed):
            wrong.append(name)
    return wrong


def find_wrong_doors(file: str, source: str) -> list[str]:
    names = read_imports(source) | read_dotted_names(source)
    return [
        door
        for door, files in DOORS.items()
        if file not in files and any(begins_with(name, door) for name in names)
    ]  # fmt: skip


def find_swallowed_errors(source: str) -> list[int]:
    """Lines of `except:` without a type, and of handlers that do nothing."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or all(isinstance(line, ast.Pass) for line in node.body))
    ]


def find_impurities(file: str, source: str) -> list[str]:
    if not PURE.fullmatch(file):
        return []
    names = read_imports(source)
    wrong = [name for name in names if any(begins_with(name, each) for each in IMPURE)]
    if file.startswith("algo/"):
        wrong += [name for name in names if not STANDARD_AND_TORCH.match(name)]
    return wrong


def find_megatron(file: str, source: str) -> list[str]:
    part = file.split("/")[0].removesuffix(".py")
    if part not in WITHOUT_MEGATRON:
        return []
    return [name for name in read_imports(source) if begins_with(name, "megatron")]


@pytest.mark.parametrize(
    "find", [find_wrong_imports, find_wrong_doors, find_impurities, find_megatron], ids=lambda find: find.__name__
)
def test_no_file_of_megarl_breaks_an_import_rule(find: Callable[[str, str], list[str]]) -> None:
    broken = {in_package(path): find(in_package(path), path.read_text()) for path in list_sources("megarl")}
    assert {file: names for file, names in broken.items() if names} == {}


@pytest.mark.parametrize(
    ("find", "file", "source"),
    [
        (find_wrong_imports, "rollout/x.py", "from megarl.trainer import roles"),
        (find_wrong_imports, "reward/x.py", "def f():\n    import megarl.models.build"),
        (find_wrong_imports, "weights/x.py", "from megarl.models import build"),
        (find_wrong_imports, "models/x.py", "from . import layout"),
        (find_wrong_imports, "algo/x.py", "from megarl.records import Scores"),
        (find_wrong_doors, "trainer/x.py", "import torch\nn = torch.cuda.device_count()"),
        (find_wrong_doors, "rollout/x.py", "from vllm import LLM"),
        (find_wrong_doors, "config/x.py", "from omegaconf import OmegaConf"),
        (find_wrong_doors, "models/x.py", "from megatron.core.transformer import TransformerConfig"),
        (find_impurities, "parallel/schedule.py", "import torch.distributed as dist"),
        (find_impurities, "algo/x.py", "import numpy"),
        (find_megatron, "rollout/x.py", "import megatron.core"),
    ],
)
def test_a_broken_rule_is_found(find: Callable[[str, str], list[str]], file: str, source: str) -> None:
    assert find(file, source)


def test_no_error_is_swallowed() -> None:
    broken = {path.name: find_swallowed_errors(path.read_text()) for path in list_sources("megarl", "examples")}
    assert {file: lines for file, lines in broken.items() if lines} == {}


def test_a_swallowed_error_is_found() -> None:
    assert find_swallowed_errors("try:\n    f()\nexcept OSError:\n    pass") == [3]


def test_no_file_is_too_long() -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in list_sources("megarl", "tests", "examples")}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_every_module_says_what_it_is_for() -> None:
    silent = [in_package(path) for path in list_sources("megarl") if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def test_init_files_hold_their_paragraph_only() -> None:
    full = [
        in_package(path)
        for path in list_sources("megarl")
        if path.name == "__init__.py" and path.parent.name != "megarl" and len(ast.parse(path.read_text()).body) != 1
    ]
    assert full == []


def test_no_module_is_called_utils() -> None:
    assert [str(path) for path in list_sources("megarl") if re.search(r"utils?|helpers?|misc|common", path.stem)] == []


def list_texts() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.suffix in TEXT_FILES and path.name != ".git")
    for folder in TEXT_FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            hidden = {"__pycache__", "out"} & set(path.parts)
            if path.is_file() and path.suffix in TEXT_FILES and not hidden:
                yield path


@pytest.mark.parametrize("what", FORBIDDEN_TEXT)
def test_no_file_names(what: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in list_texts()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if FORBIDDEN_TEXT[what].search(line)
    ]
    assert found == []


def test_every_folder_of_tests_is_collected() -> None:
    """pytest passes over folders named `dist` unless told otherwise: tests that never run cannot fail."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "dist" not in options["norecursedirs"] and options["testpaths"] == ["tests"]


def test_the_map_names_every_part() -> None:
    """docs/architecture.md lists each module beside the parts, and each part."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    chart = text[text.index("## The map") :].split("```")[1]
    parts = [path for path in (ROOT / "megarl").iterdir() if path.name[0] not in "._"]
    names = [path.name if path.is_file() else path.name + "/" for path in parts if path.suffix in ("", ".py")]
    assert [name for name in names if name not in chart and name not in ("__init__.py", "__main__.py")] == []
