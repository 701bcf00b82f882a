"""Imports go one way. Read from the source, so that imports inside functions and under TYPE_CHECKING count as well."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "src"
PACKAGE = "draftsmith"

# What may import what: a module imports those of lower levels, and its own folder.
LEVELS = (
    ("errors", "params", "params_models", "params_serving", "paths", "manifest", "figures", "termination", "storage",
     "storage_base", "storage_local", "storage_disk", "storage_s3", "storage_s3_errors", "storage_s3_retry",
     "provenance", "tracking_database", "tracking", "deployment_names"),
    ("nn", "text"),
    ("targets",),
    ("cache", "drafters"),
    ("training", "decoding"),
    ("calibration", "evaluation", "serving"),
    ("jobs",),
    ("cli", "cli_options", "cli_cache", "cli_evaluate", "cli_profile", "cli_serve"),
)  # fmt: skip
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}
BASE = LEVELS[0]

# Parts of one level that stand apart and do not import each other.
STRANGERS = (
    {"nn", "text"}, {"cache", "drafters"}, {"training", "decoding"}, {"calibration", "evaluation"},
)  # fmt: skip

# What a plan, a help text or an error in params.yaml must not wait for.
HEAVY = ("torch", "deepspeed", "transformers", "datasets", "accelerate")

# Third-party packages with one owner each.
OWNERS = {
    "mlflow": {"draftsmith.tracking"},
    "deepspeed": {"draftsmith.training.engine"},
    "boto3": {"draftsmith.storage_s3_retry"},
    "botocore": {"draftsmith.storage_s3", "draftsmith.storage_s3_errors", "draftsmith.storage_s3_retry"},
    "zarr": {"draftsmith.cache.codec_bf16", "draftsmith.cache.codec_int8", "draftsmith.cache.schema"},
}

# Files of `drafters` and `targets` that any sibling may import; the rest are one file a kind or family.
SHARED = {
    "drafters": {"base", "registry", "contract", "fields"},
    "targets": {"base", "families", "capture", "fetch"},
}
PARENTS = {
    # A DSpark drafter is a DFlash with two more heads, and its class says so by inheriting.
    ("draftsmith.drafters.dspark", "draftsmith.drafters.dflash"),
    # How a DSpark drafter's sequential head starts.
    ("draftsmith.drafters.start", "draftsmith.drafters.dspark"),
}
# The tables that name every kind and family: what a new one is added to.
TABLES = {"draftsmith.drafters.registry", "draftsmith.targets.families"}


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, module: str) -> Iterator[str]:
    """Full names that a file imports; of `from a import b` both a and a.b, for b may be a module."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                stem = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*stem, *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


FILES = {module_name(path, SOURCE): path for path in sorted((SOURCE / PACKAGE).rglob("*.py"))}
IMPORTS = {module: sorted(set(imports(path, module))) for module, path in FILES.items()}
# Only names that are modules: of `from draftsmith.params import Train` the module is draftsmith.params.
OWN = {module: [name for name in names if name in FILES and name != PACKAGE] for module, names in IMPORTS.items()}


def part(module: str) -> str:
    """`nn` of draftsmith.nn.layers, `params` of draftsmith.params."""
    return module.split(".")[1]


def test_the_reading_finds_imports_of_every_form(tmp_path: Path) -> None:
    file = tmp_path / "c.py"
    file.write_text(
        "import a.b\nfrom d import e\nfrom . import f\nfrom ..g import h\n"
        "def i():\n    import j\nif TYPE_CHECKING:\n    from k import l\n"
    )
    found = set(imports(file, "p.q.c"))
    assert {"a.b", "d.e", "p.q.f", "p.g.h", "j", "k.l"} <= found


def test_every_module_has_a_level() -> None:
    assert len(FILES) > 50
    unknown = sorted({part(module) for module in FILES if module != PACKAGE} - LEVEL.keys())
    assert unknown == []


def test_imports_go_down() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, names in OWN.items()
        if module != PACKAGE
        for name in names
        if LEVEL[part(name)] > LEVEL[part(module)]
        or any({part(name), part(module)} == pair for pair in STRANGERS if part(name) != part(module))
    ]
    assert wrong == []


def test_no_import_cycles() -> None:
    """Within a level and a folder, too."""
    visiting: list[str] = []
    done: set[str] = set()

    def visit(module: str) -> None:
        assert module not in visiting, " -> ".join([*visiting[visiting.index(module) :], module])
        if module in done:
            return
        visiting.append(module)
        for name in _runtime(module):
            visit(name)
        visiting.pop()
        done.add(module)

    for module in FILES:
        visit(module)


def _runtime(module: str) -> list[str]:
    """Modules imported while `module` itself is being imported: not in functions, not for type checkers."""
    found: list[str] = []
    for node in ast.parse(FILES[module].read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found += [name for name in names if name in FILES and name != PACKAGE]
    return found


def test_the_base_names_no_heavy_package() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, names in IMPORTS.items()
        if module != PACKAGE and part(module) in (*BASE, "cli")
        for name in names
        if name.split(".")[0] in HEAVY
    ]
    assert wrong == []


def test_importing_the_base_loads_no_torch() -> None:
    """What the source cannot show: that no third-party package of the base brings torch along."""
    modules = [f"{PACKAGE}.{name}" for name in (*BASE, "cli")]
    modules += [f"{PACKAGE}.cache.plan", f"{PACKAGE}.jobs.forecast"]
    code = f"import sys, {', '.join(modules)}; print([n for n in {HEAVY!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", OWNERS)
def test_each_service_has_one_owner(package: str) -> None:
    users = {module for module, names in IMPORTS.items() if any(name.split(".")[0] == package for name in names)}
    assert users <= OWNERS[package]
    assert users, f"nothing imports {package} any more: drop its row here"


@pytest.mark.parametrize("folder", SHARED)
def test_drafters_and_targets_do_not_import_siblings(folder: str) -> None:
    """Shared parts go down to `nn`; a new kind or family is one file and an entry in its table."""
    wrong = [
        f"{module} imports {name}"
        for module, names in OWN.items()
        if module.startswith(f"{PACKAGE}.{folder}.") and module not in TABLES
        for name in names
        if name.startswith(f"{PACKAGE}.{folder}.") and name.rpartition(".")[2] not in SHARED[folder]
        if (module, name) not in PARENTS
    ]
    assert wrong == []


def test_flows_import_three_modules_only() -> None:
    allowed = {"draftsmith.params", "draftsmith.paths", "draftsmith.errors"}
    files = sorted((REPOSITORY / "flows").glob("*.py"))
    assert files
    for path in files:
        names = set(imports(path, module_name(path, REPOSITORY)))
        used = {name for name in names if name in FILES and name != PACKAGE}
        assert used <= allowed, path.name


def test_no_file_is_two_files() -> None:
    long = {module: count for module, path in FILES.items() if (count := len(path.read_text().splitlines())) > 400}
    assert long == {}


def test_nothing_prints() -> None:
    """Only the command line talks to the user; jobs write to stderr by name or not at all."""
    wrong = [
        f"{module}:{node.lineno}"
        for module, path in FILES.items()
        if module != f"{PACKAGE}.cli"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert wrong == []
