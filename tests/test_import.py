# SPDX-License-Identifier: Apache-2.0
"""Importing the package is cheap and has no side effect; modules import only lower rooms."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvpress
from tests.models import tiny_model, tokens

PACKAGE = Path(kvpress.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "data" not in path.relative_to(PACKAGE).parts)


def python(code: str) -> str:
    """Run code in a new interpreter and return its output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "transformers", "triton", "rich", "typer", "pydantic", "safetensors", "yaml"]
    assert python(f"import sys, kvpress; print([m for m in {heavy} if m in sys.modules])") == "[]"
    modules = python("import sys, kvpress; print(*[m for m in sys.modules if m.startswith('kvpress')])").split()
    assert set(modules) <= {"kvpress", "kvpress._version"}  # an installation writes the second


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import kvpress.cli; kvpress.cli.app(['list', '--json'], standalone_mode=False)", ["torch", "transformers"]),
        (
            "import kvpress; kvpress.get_press('adakv(snapkv) + kivi:bits=4 + quest:budget=64')",
            ["transformers", "torch.distributed.tensor"],
        ),
        (
            "import kvpress.plan, kvpress.hf.config as c; kvpress.plan.Geometry.of(c.load_config('reference'))",
            ["transformers.modeling_utils"],
        ),
    ],
    ids=["list", "parse a spec", "plan"],
)
def test_commands_without_a_model_import_no_bulk(code: str, absent: list[str]) -> None:
    last = python(f"import sys\n{code}\nprint([name for name in {absent} if name in sys.modules])").splitlines()[-1]
    assert last == "[]"


def test_the_description_of_a_file_is_read_without_torch(tmp_path: Path) -> None:
    model = tiny_model("llama")
    press = kvpress.get_press("knorm:0.5")
    with press(model):
        cache = model(tokens(1, 64)).past_key_values
    kvpress.save(cache, tmp_path / "text.kv", model, press)
    code = f"""
import sys, kvpress
info = kvpress.cache_info({str(tmp_path / "text.kv")!r})
print(info.press, info.length, "torch" in sys.modules, "transformers" in sys.modules)
"""
    assert python(code).split() == ["knorm:compression_ratio=0.5", "64", "False", "False"]


@pytest.mark.parametrize(
    "lines",
    [
        "import kvpress; from transformers import pipeline",
        "from transformers import pipeline; import kvpress",
        "import transformers, kvpress; from transformers.pipelines import pipeline",
        "import kvpress, transformers; pipeline = transformers.pipeline",
    ],
)
def test_the_pipeline_is_registered_on_import_and_loaded_on_use(lines: str) -> None:
    code = f"""
import sys
{lines}
print("kvpress.hf.generation.pipeline" in sys.modules, "kvpress.core.press" in sys.modules)
print(any(type(finder).__module__ == "kvpress" for finder in sys.meta_path))
made = pipeline("kv-press-text-generation", model=str(kvpress.reference_path()))
print(type(made) is kvpress.KVPressTextGenerationPipeline)
"""
    assert python(code).split() == ["False", "False", "False", "True"]


def test_import_leaves_the_registries_of_transformers_alone_but_for_the_pipelines_task() -> None:
    code = """
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING
from transformers.pipelines import PIPELINE_REGISTRY
import torch

def state():
    return (dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping),
            dict(DYNAMIC_LAYER_TYPE_MAPPING), set(PIPELINE_REGISTRY.get_supported_tasks()) - {"kv-press-text-generation"},
            torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.get_rng_state().sum())

before = state()
import kvpress, kvpress.hf, kvpress.hf.generation.pipeline, kvpress.cli, kvpress.plan
import kvpress.presses, kvpress.quant, kvpress.sparse, kvpress.kernels
print(state() == before)
print("kv-press-text-generation" in PIPELINE_REGISTRY.get_supported_tasks())
"""
    assert python(code).split() == ["True", "True"]


def test_import_writes_nothing_and_prints_nothing() -> None:
    assert python("import kvpress") == ""


def test_every_public_name_exists_and_nothing_else() -> None:
    for name in kvpress.__all__:
        assert getattr(kvpress, name) is not None
    assert dir(kvpress) == kvpress.__all__
    with pytest.raises(AttributeError, match="'kvpress' has no attribute 'KnormPres'"):
        kvpress.KnormPres  # noqa: B018


def imports(path: Path) -> set[str]:
    """Return the top-level packages that a source file imports anywhere, lazily or not."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            modules |= {str(a.value).split(".")[0] for a in node.args if isinstance(a, ast.Constant)}
    return modules


RANKS = (
    "_version", "env", "atomic", "signals", "counts", "packages", "kernels", "cache", "observe", "core", "presses", "quant",
    "sparse", "calibrate", "hf", "diffusion", "speculation", "compat", "attention_patch", "utils", "pipeline", "plan",
    "terminal", "doctor", "cli", "testing",
)  # fmt: skip
"""Rooms of the library, lowest first: a module imports its own room and the rooms before it."""


def name_of(path: Path) -> str:
    """Return the name of a module below `kvpress`, without the package; empty for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def arrows() -> dict[str, set[str]]:
    """Return all imports of the library within itself: at the top of a module, in functions, for type checkers."""
    names = {name_of(path) for path in SOURCES}
    imported: dict[str, set[str]] = {}
    for path in SOURCES:
        targets: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names if alias.name.startswith("kvpress.")}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kvpress":
                paths = [f"{node.module}.{alias.name}" for alias in node.names]
                targets |= {name if name.removeprefix("kvpress.") in names else str(node.module) for name in paths}
        imported[name_of(path)] = {name.removeprefix("kvpress").removeprefix(".") for name in targets} - {""}
    return imported


def rank(module: str) -> int:
    """Return the index of the room that a module belongs to."""
    return max(
        (place for place, room in enumerate(RANKS) if module == room or module.startswith(f"{room}.")),
        key=lambda place: len(RANKS[place]),
    )


def test_every_arrow_runs_down() -> None:
    for module, targets in arrows().items():
        if module:
            up = {target for target in targets if rank(target) > rank(module)}
            assert not up, f"{module} knows {sorted(up)}, which lie above it"


def test_one_module_below_the_support_for_peers_programs_refers_to_it() -> None:
    """Imports by name in functions count, which are no arrows."""
    below = [path for path in SOURCES if name_of(path) and rank(name_of(path)) < RANKS.index("compat")]
    referring = [
        name_of(path)
        for path in below
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and re.fullmatch(r"kvpress\.compat(\.\w+)*", str(node.value))
    ]
    assert referring == ["core.adapter"]


def test_no_modules_import_each_other() -> None:
    remaining = {module: set(targets) for module, targets in arrows().items() if module}
    while free := [module for module, targets in remaining.items() if not targets & set(remaining)]:
        for module in free:
            del remaining[module]
    assert not remaining, f"these modules import each other: {sorted(remaining)}"


def test_only_hf_the_names_of_others_and_the_checks_that_run_models_import_transformers() -> None:
    assert {p.relative_to(PACKAGE).parts[0] for p in SOURCES if "transformers" in imports(p)} == {
        "hf",
        "compat",
        "testing",
    }


def test_checks_of_presses_need_no_test_runner_and_nothing_imports_them() -> None:
    testing = {path for path in SOURCES if name_of(path).startswith("testing")}
    assert not any("pytest" in imports(path) for path in testing)
    importing = {module for module, targets in arrows().items() if any(name.startswith("testing") for name in targets)}
    assert importing <= {name_of(path) for path in testing}


def test_the_library_never_imports_its_evaluation_or_tests() -> None:
    for path in SOURCES:
        assert not imports(path) & {"kvpress_eval", "eval", "tests", "benchmarks"}, path


def test_only_one_file_reads_the_environment() -> None:
    readers = [
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
    ]
    assert set(readers) == {"env.py"}


def test_triton_and_optional_packages_are_not_needed() -> None:
    code = """
import sys
for name in ("triton", "matplotlib", "scipy", "pandas", "flash_attn", "ray", "accelerate"):
    sys.modules[name] = None
import kvpress, torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
config.eos_token_id = None
model = LlamaForCausalLM(config)
press = kvpress.get_press("knorm:0.5 + kivi:bits=4,group_size=16,residual_length=0 + quest:budget=16")
with press(model):
    print(model.generate(torch.ones(1, 40, dtype=torch.long), max_new_tokens=2, do_sample=False).shape[1])
"""
    assert python(code) == "42"


def test_no_two_public_classes_have_one_name() -> None:
    files: dict[str, list[str]] = {}
    for folder in (PACKAGE, PACKAGE.parent / "eval" / "kvpress_eval"):
        for path in sorted(folder.rglob("*.py")):
            if "data" in path.parts:
                continue
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    files.setdefault(node.name, []).append(str(path.relative_to(PACKAGE.parent)))
    assert not {name: places for name, places in files.items() if len(places) > 1}
