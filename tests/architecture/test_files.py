"""House rules that a machine can check."""

import re
import subprocess
from pathlib import Path

import megatron_dsv

PACKAGE = Path(megatron_dsv.__file__).parent
REPOSITORY = PACKAGE.parent
TEXT = {".py", ".yaml", ".toml", ".sh", ".sbatch", ".md", ".json", ".txt", ".in", ""}


def repository_files() -> list[Path]:
    """What is under version control, or every file of the known folders where git is not at hand."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode == 0 and done.stdout:
        listed = [REPOSITORY / name for name in done.stdout.split("\0") if name]
    else:
        folders = ("megatron_dsv", "configs", "scripts", "docs", "tests", "benchmarks", "constraints", ".ci")
        listed = [*REPOSITORY.glob("*.*"), *(path for folder in folders for path in (REPOSITORY / folder).rglob("*"))]
    return sorted(path for path in listed if path.is_file() and path.suffix in TEXT)


def name(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def test_files_are_small():
    too_long = []
    for path in repository_files():
        if path.suffix in {".py", ".sh", ".sbatch"}:
            limit = 500 if "kernels" in path.relative_to(REPOSITORY).parts else 350
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > limit:
                too_long.append(f"{name(path)}: {lines} lines, limit {limit}")
    assert too_long == []


def test_there_is_no_drawer():
    drawers = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py", "utils", "helpers", "common"}
    assert [str(path) for path in PACKAGE.rglob("*") if path.name in drawers] == []


def test_every_module_says_what_it_is():
    silent = [str(path.relative_to(PACKAGE)) for path in sorted(PACKAGE.rglob("*.py"))
              if path.read_text(encoding="utf-8").strip()
              and not path.read_text(encoding="utf-8").lstrip().startswith(('"""', 'r"""'))]
    assert silent == []


def mentions(pattern: str) -> list[str]:
    return [f"{name(path)}:{number}: {line.strip()[:80]}" for path in repository_files()
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if re.search(pattern, line)]


def test_no_path_of_one_machine():
    folders = ("root", "work", "home", "Users", "mnt", "scratch")
    assert mentions(rf"(?<![\w.$}}/-])/(?:{'|'.join(folders)})/(?!user\b)\w") == []


def test_no_index_and_no_host_of_packages():
    flags = ("index" + "-url", "find" + "-links", "trusted" + "-host")
    hosts = ("pypi.org" + "/simple", "download." + "pytorch.org", "files." + "pythonhosted.org")
    assert mentions("|".join(re.escape(text) for text in (*flags, *hosts))) == []
    assert mentions(r"\b(?:10|172|192)\.\d{1,3}\.\d{1,3}\.\d{1,3}\b") == []


def test_nothing_is_left_to_fill_in():
    placeholder = "@" + "@[A-Z_]+@" + "@"
    assert mentions(placeholder) == []
    words = r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX")) + r")\b"
    assert [row for row in mentions(words) if not row.partition(":")[0].endswith(".md")] == []
