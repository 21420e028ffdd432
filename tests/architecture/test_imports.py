"""What importing the package costs, and where optional packages may be imported."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_dsv

PACKAGE = Path(megatron_dsv.__file__).parent
HEAVY = ("triton", "transformer_engine", "apex", "wandb", "diffusers", "transformers", "flash_attn", "cudnn")


def loaded_by(statement):
    code = f"import sys; {statement}; print('\\n'.join(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.splitlines()}


@pytest.mark.parametrize("statement", [
    "import megatron_dsv",
    "import megatron_dsv.cli.main",
    "import megatron_dsv.kernels.sparse_attention.api, megatron_dsv.kernels.dense_attention.api, "
    "megatron_dsv.kernels.block_scores.api, megatron_dsv.kernels.predictor_loss.api, "
    "megatron_dsv.kernels.attention_profile.api",
    "import megatron_dsv.data.codecs, megatron_dsv.data.text, megatron_dsv.sparsity.selection_rules",
])
def test_optional_packages_are_not_loaded(statement):
    loaded = loaded_by(statement)
    assert not loaded & set(HEAVY)
    assert "megatron" not in loaded


def test_the_package_and_the_command_are_light():
    assert not loaded_by("import megatron_dsv, megatron_dsv.cli.main") & {"torch", "numpy", "yaml"}


def top_level_imports(path):
    """Packages imported when the module is, not inside its functions nor under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def test_optional_packages_are_imported_at_the_top_of_triton_modules_alone():
    offenders = [f"{path.relative_to(PACKAGE)}: {name}" for path in sorted(PACKAGE.rglob("*.py"))
                 for name in top_level_imports(path) if name in HEAVY
                 and not (name == "triton" and "triton" in path.relative_to(PACKAGE).parts)]
    assert offenders == []


def test_megatrons_global_process_groups_are_read_in_one_file():
    names = {"parallel_state", "mpu", "use_mpu_process_groups"}
    readers = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")
               for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
               if names & {getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "name", None)}}
    assert {path for path in readers if not path.startswith("testing/")} == {"training/builders.py"}


def test_the_import_contracts_hold():
    pytest.importorskip("importlinter")
    done = subprocess.run([str(Path(sys.executable).with_name("lint-imports")), "--no-cache"], cwd=PACKAGE.parent,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
