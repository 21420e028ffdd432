"""House rules that a machine can check."""

from pathlib import Path

import megatron_dsv

PACKAGE = Path(megatron_dsv.__file__).parent
REPOSITORY = PACKAGE.parent


def test_files_are_small():
    too_long = []
    for path in sorted(PACKAGE.rglob("*.py")):
        limit = 500 if "kernels" in path.relative_to(PACKAGE).parts else 350
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > limit:
            too_long.append(f"{path.relative_to(PACKAGE)}: {lines} lines, limit {limit}")
    assert too_long == []


def test_there_is_no_drawer():
    drawers = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py", "utils", "helpers", "common"}
    assert [str(path) for path in PACKAGE.rglob("*") if path.name in drawers] == []


def test_every_module_says_what_it_is():
    silent = [str(path.relative_to(PACKAGE)) for path in sorted(PACKAGE.rglob("*.py"))
              if path.read_text(encoding="utf-8").strip()
              and not path.read_text(encoding="utf-8").lstrip().startswith(('"""', 'r"""'))]
    assert silent == []


def test_no_path_of_one_machine():
    folders = ("megatron_dsv", "configs", "scripts", "docs", "tests", "benchmarks")
    home, work = "/" + "root" + "/", "/" + "work" + "/"
    named = [str(path.relative_to(REPOSITORY)) for folder in folders for path in (REPOSITORY / folder).rglob("*")
             if path.suffix in {".py", ".yaml", ".sh", ".sbatch", ".md", ".json"}
             and any(text in path.read_text(encoding="utf-8") for text in (home, work))]
    assert named == []
