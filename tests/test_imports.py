"""The cost of importing Choreo, and the packages that it is allowed to import."""

import ast
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAVY = ("jax", "equinox", "optax", "gymnasium", "matplotlib", "numpy", "scipy")


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_imports_nothing_heavy():
    code = (
        "import sys, choreo.cli.main\n"
        "assert choreo.cli.main.main(['--help']) == 0\n"
        f"print('imported:', *[m for m in {HEAVY} if m in sys.modules])"
    )
    assert run_python(code).splitlines()[-1].strip() == "imported:"


def test_comparing_runs_needs_no_jax():
    """`choreo compare` only reads run folders. Without JAX it starts twice as fast."""
    code = "import sys, choreo.runs.compare; print('jax' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_help_answers_within_a_second():
    def seconds() -> float:
        start = time.perf_counter()
        out = subprocess.run([sys.executable, "-m", "choreo", "--help"], capture_output=True, text=True, timeout=60)
        assert out.returncode == 0 and "train" in out.stdout, out.stderr
        return time.perf_counter() - start

    # The fastest of several calls, because other tests run at the same time, and the first call may write bytecode.
    assert min(seconds() for _ in range(4)) < 1.0


def test_public_names_exist_and_import_no_optional_package():
    """If only few users need a package, Choreo imports the package only in the functions that use it."""
    missing = "import choreo, choreo.algos, choreo.envs; print([n for n in choreo.__all__ if not hasattr(choreo, n)])"
    extras = "import sys; print([m for m in ('gymnax', 'flax', 'tensorboardX', 'matplotlib') if m in sys.modules])"
    assert run_python(f"{missing}\n{extras}").split() == ["[]", "[]"]


def test_no_module_hides_a_public_function():
    """When Python imports a submodule, it sets an attribute of this name in the package. So a submodule would replace a public
    function of the same name."""
    code = "import choreo; print(*[n for n in choreo._MODULE_OF if importlib.util.find_spec(f'choreo.{n}')])"
    assert run_python(f"import importlib.util; {code}").strip() == ""


def test_only_compat_uses_private_modules_of_jax():
    """Ruff bans `jax._src` in all files except `_compat.py` and `test_compat.py`. This test shows that the rule is active."""
    wrong = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--stdin-filename", "src/choreo/x.py", "-"],
        input="from jax._src import core\nimport jax\njax._src.core\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert wrong.stdout.count("Only choreo/_compat.py touches jax._src") == 2, wrong.stdout + wrong.stderr


def test_dependencies_are_those_that_are_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = {package_name(d) for d in project["dependencies"]}
    optional = {package_name(d) for extra in ("gymnax", "tensorboard", "flax") for d in extras[extra]}
    called = {"zmq": "pyzmq"}
    imported = (
        {called.get(m, m) for path in (ROOT / "src").rglob("*.py") for m in imports_of(path)}
        - sys.stdlib_module_names
        - {"choreo"}
    )
    through_jax = {"filelock", "flatbuffers"}  # JAX imports them, for its compilation cache and for export
    assert imported - optional | through_jax == required


def package_name(requirement: str) -> str:
    return re.split(r"[<>=\[ ]", requirement)[0].replace("-", "_")


def imports_of(path: Path) -> set[str]:
    """The top-level packages that a file imports anywhere."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.split(".")[0] for name in names}
