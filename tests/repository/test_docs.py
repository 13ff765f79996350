"""Tests for README, page and docstring examples: the code runs and prints the documented output."""

import contextlib
import doctest
import importlib
import io
import pathlib
import pkgutil
import re
import tomllib

import jax
import jax.numpy as jnp
import pages
import pytest
from cases import absence, slow_among, slow_where
from folders import ROOT
from pages import read

import lutjax
from lutjax import optim as tables
from lutjax.dispatch.registry import kernel_registry
from lutjax.testing import _ahead_of_time
from lutjax.values import _ngrams

README = (ROOT / "README.md").read_text()
OPS = (ROOT / "docs" / "reference" / "ops.md").read_text()
ROOMS = ("start", "reference", "appendix")
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(page for room in ROOMS for page in (ROOT / "docs" / room).glob("*.md")),
]
LONG_PAGES = ("bundles", "cellular-automaton", "coming-from", "columns", "convert", "feed-forward", "gpu", "host-memory",
              "image-folders", "images", "implementations", "index", "logic", "memory", "programs", "recipes", "scaling",
              "semantics", "sharp-bits", "ten-minutes", "training-large-tables")  # fmt: skip


def is_long(page):
    """Return True if a page takes long to run."""
    return page.stem in LONG_PAGES or page.parent.name == "appendix"


def modules():
    for module in pkgutil.walk_packages(lutjax.__path__, "lutjax."):
        if not module.name.endswith("__main__"):
            yield module.name


@pytest.fixture
def as_a_reader(without_typechecking):
    """Run with JAX's default settings."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize(
    "page",
    slow_where(PAGES, is_long),
    ids=lambda page: page.relative_to(
        ROOT / "docs" if page.name != "README.md" else ROOT
    ).as_posix(),
)
@pytest.mark.usefixtures("as_a_reader")
def test_pages_run(page, request):
    """Run all code blocks in order in one namespace."""
    namespace, outputs, text = {}, [], page.read_text()
    if "native/cpu" in text:  # it shows what is chosen where nothing but lutjax is installed
        request.getfixturevalue("without_native")
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, page.name, "exec"), namespace)
        outputs.append(printed.getvalue())
    for shown in re.findall(r"<!-- output -->\n```\n(.*?)```", text, re.DOTALL):
        assert shown in outputs


def test_tables_name_command_machine_versions_and_date():
    table = pages.extension("content").bench_table("scored.csv")
    assert re.search(
        r"^\| heads \(scored:[\d,]+\) \| forward \| [\d.]+ [mu]s \|", table, re.MULTILINE
    )
    assert (
        "Measured with `lutjax bench` 2026-11-26, NVIDIA H100 80GB HBM3, lutjax 0.2.0, jax "
        in table
    )
    table = pages.extension("content").bench_table("choose.json reads")
    assert re.search(r"^\| `Blend\(\)` \| 2 \| [\d.]+ \| [\d.]+ \| no \|$", table, re.MULTILINE)
    assert re.search(
        r"`python benchmarks/choose.py reads`, \d{4}-\d\d-\d\d, 2 cores .*, lutjax [\d.]+, jax [\d.]+\.\n$",
        table,
    )


def test_every_directive_of_a_page_is_expanded():
    content = pages.extension("content")
    used = set()
    for path in (ROOT / "docs").rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        used |= {m[1] for m in content.BLOCK.finditer(text)}
        assert "```{bench-table}" not in read(path), path
    assert used == set(content.DIRECTIVES)


def ops_with_a_kernel(folder):
    """Return ops with a kernel module in a folder."""
    return {path.stem for path in (ROOT / folder).glob("*.py") if not path.stem.startswith("_")}


NATIVE, TRITON, MOSAIC, TENSORCORE = map(
    ops_with_a_kernel,
    (
        "native/lutjax_cpu/kernels",
        "lutjax/kernels/_triton",
        "lutjax/kernels/_pallas/gpu",
        "lutjax/kernels/_pallas/tpu",
    ),
)
REGISTERED = kernel_registry.ops()
UPDATED = {op for op in REGISTERED if "update" in kernel_registry.directions(op)}


def test_the_table_of_ops_is_that_of_kernel_modules():
    rows = re.findall(
        r"^\| `(\w+)` \| (.*) \|$", pages.extension("content").op_table(), re.MULTILINE
    )
    assert [op for op, _ in rows] == list(REGISTERED)
    for op, cells in rows:
        expected = [op in ops for ops in (NATIVE, TRITON, MOSAIC, TENSORCORE, UPDATED)]
        assert cells.split(" | ") == ["yes" if actual else "—" for actual in expected], op


def test_figures_of_gpus_are_rows_of_the_appendix():
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    lines = read(ROOT / "docs" / "appendix" / "gpu.md").splitlines()
    rows = re.findall(r"^\| H[12]00 \| ([\w-]+) \| ([\w +,]+) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > 10
    cells = [{cell.strip() for cell in line.split("|")} for line in lines]
    for shape, direction, times in rows:
        shown = {time.strip() for time in times.split("|")}
        same = [
            of for line, of in zip(lines, cells, strict=True) if line.startswith(f"| {shape} (")
        ]
        assert any({direction, *shown} <= of for of in same), (shape, direction)


def test_each_file_of_measurements_says_how_it_was_made():
    folder = ROOT / "docs" / "benchmarks"
    text = (folder / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \| \[", text, re.MULTILINE)
    assert {name for name, _ in rows} == {path.name for path in folder.iterdir()} - {"README.md"}
    for _, commands in rows:
        for script in re.findall(r"(?:benchmarks|docs)/\w+\.py", commands):
            assert (ROOT / script).exists(), script


def _lm_help():
    """Return `lutjax train lm --help` as one line."""
    from lutjax.cli._main import cli

    [preset] = [p for p in cli.commands["train"].commands["lm"].params if p.name == "preset"]
    return " ".join(preset.help.split())


def in_words(ops):
    """Join op names into an English list."""
    *first, last = (f"`{op}`" for op in ops)
    return f"{', '.join(first)} and {last}" if first else last


def test_sentences_about_ops_are_those_of_kernel_modules():
    no_triton, no_native, no_tensorcore = (
        in_words(op for op in REGISTERED if op not in ops) for ops in (TRITON, NATIVE, TENSORCORE)
    )
    sentences = {
        r"All ops except (.*) also have Triton kernels": no_triton,
        r"(`.*`) have no Triton kernel": no_triton,
        r"if Triton has no kernel: (`.*`), and": no_triton,
        r"and all except (.*) have native": no_native,
        r"all other ops \| (`.*`); layers": no_native,
        r"all ops except (.*), with": no_tensorcore,
        r"available for the tables of (.*), and for": in_words(op for op in REGISTERED if op in UPDATED),
    }  # fmt: skip
    text = "\n".join(" ".join(page.read_text(encoding="utf-8").split()) for page in PAGES)
    for pattern, listed in sentences.items():
        result = re.findall(pattern.replace(".*", "[^.|]*?"), text)
        assert result, pattern
        assert set(result) == {listed}, pattern
    # A list in the text by which the page on TPUs describes each kernel, and what calls say of their tables.
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \|",
        (ROOT / "docs" / "tpu.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    described = {op for row in rows for op in re.findall(r"`(\w+)`", row)}
    assert described == TENSORCORE
    for op in REGISTERED:
        calls = vars(importlib.import_module(f"lutjax.ops.{op}")).values()
        tables = {
            call.table_name
            for call in calls
            if isinstance(call, type) and getattr(call, "op", None) == op
        }
        assert (op in UPDATED) == (tables != {None}), op


def test_training_times_are_those_of_the_table():
    page = (ROOT / "docs" / "appendix" / "feed-forward.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `scored_lut`(?: in (plain JAX))? \| [\d,]+ \| \d+ \| (?:\d+ to )?(\d+) \|",
        page,
        re.MULTILINE,
    )
    minutes = {kind: int(most) / 60 for kind, most in rows}
    native, plain = minutes[""], minutes["plain JAX"]
    assert 2 < native < 3 < plain < 4, "the README states two to three minutes, and a minute longer"
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert f"takes {plain:.1f} minutes on two cores instead of {native:.1f} minutes" in text
    assert (
        f"{native:.1f} minutes on two CPU cores with native kernels, {plain:.1f} in plain JAX"
        in text
    )
    seconds = re.findall(r"^\| `?(\w+)`? \| ([\d,]+) \| \d+ \| (\d+ to \d+) \|", page, re.MULTILINE)
    assert len(seconds) == 2
    choice = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8")
    for _, parameters, shown in seconds:
        assert f" | {parameters} | {shown} | " in choice
    assert f"demo, about {native:.0f} minutes on two CPU cores" in _lm_help()


@pytest.mark.slow
def test_what_has_a_factored_gradient_is_what_the_page_lists():
    """Check each listed op and composition separately, and check that no other op or composition has a table."""
    page = (ROOT / "docs" / "training-large-tables.md").read_text(encoding="utf-8")
    ops, compositions = (
        re.findall(r"`(\w+)`", listed)
        for listed in re.search(
            r"available for the tables of (.*?), and for (.*?), which are built from these ops",
            page,
        ).groups()
    )
    key = jax.random.key(0)
    x, images, anchors = (
        jax.random.normal(key, (3, 5, 8)),
        jax.random.normal(key, (2, 5, 5)),
        lutjax.sample_anchors(key, 8, 2, 3),
    )
    calls = {
        "lut": lambda w: lutjax.lut(x, w, anchors),
        "sparse_lut": lambda w: lutjax.sparse_lut(x, w, anchors, jnp.zeros((2, 8, 4), int), 5),
        "conv_lut": lambda w: lutjax.conv_lut(
            images[..., None], w, lutjax.sample_anchors(key, 9, 2, 3), kernel=3
        ),
        "lut_attention": lambda w: lutjax.lut_attention(x, w, anchors),
    }
    assert set(compositions) == set(calls)
    for name, call in calls.items():
        table = jnp.ones((2, 64 if name == "lut_attention" else 8, 4))
        _, gradients = tables.value_and_grad(lambda p, call=call: jnp.sum(call(p["table"])))(
            {"table": table}
        )
        assert isinstance(gradients["table"], tables.TableGradient), name
    assert ops == [op for op in REGISTERED if op in UPDATED]
    others = {"logic_gates": "no table", "update_table": "takes such a gradient"}
    assert set(lutjax.kernel_registry._compositions) == set(calls) | set(others)


def test_readme_keeps_its_promises():
    shell = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    assert shell[0] == 'pip install --no-compile ".[apps]" ./native && lutjax train lm\n'
    assert shell[1] == 'pip install -e ".[dev]" && pytest\n'
    assert len(README.splitlines()) <= 120
    assert "<!--" not in README, "scripts write no part of the README"


def test_every_public_op_is_in_the_table_of_ops():
    from lutjax import ops

    for module in pkgutil.iter_modules(ops.__path__):
        if module.name in lutjax.__all__:
            assert f"`{module.name}(" in OPS, module.name


# Those whose examples compile large programs: tests of their own run what these show.
LONG_EXAMPLES = (
    "lutjax.models.tree_net", "lutjax.models.gpt", "lutjax.models.transformer", "lutjax.layers.nnx._projection", "lutjax.layers.nnx._images",
    "lutjax.models.classifier", "lutjax.training.integers", "lutjax.circuits.models", "lutjax.layers.haiku",
    "lutjax.layers.linen", "lutjax.models._decoder", "lutjax.layers.nnx._logic", "lutjax.layers.nnx._tables",
    "lutjax.layers.nnx._memory", "lutjax.models._slots", "lutjax.models.automaton", "lutjax.tables.host_tables",
    "lutjax.convert._packages", "lutjax.circuits.detectors", "lutjax.bundles.programs", "lutjax.optim._optimizer",
    "lutjax.models.packed", "lutjax.models.packed_automaton", "lutjax.optim.linen", "lutjax.optim.nnx", "lutjax.reads",
    "lutjax.circuits.fpga", "lutjax.wiring._gates", "lutjax.wiring._names", "lutjax.training.augment", "lutjax.tables.host",
    "lutjax.bundles.saving", "lutjax.convert._spiky", "lutjax.ops.conv_lut", "lutjax.ops.lut_attention",
    "lutjax.layers.nnx._layer", "lutjax.optim._gradients",
)  # fmt: skip


@pytest.mark.parametrize("name", slow_among(modules(), *LONG_EXAMPLES))
@pytest.mark.usefixtures("as_a_reader")
def test_docstrings(name, request):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(absence(name, error))
    if name == "lutjax.dispatch.registry":
        request.getfixturevalue("without_native")
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in finder.find(module, name, module=module):
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_public_functions_have_examples():
    for name in lutjax.__all__:
        value = getattr(lutjax, name)
        if callable(value) and not isinstance(value, type):
            assert ">>>" in (value.__doc__ or ""), name


SECTION = re.compile(r"(?m)^## (\d+)\. ")


def test_sources_exist():
    """Check that each docstring "Source:" line names an existing page and its sections."""
    pages = [page for page in PAGES if page.parent == ROOT / "docs"]
    sections = {page.name: set(SECTION.findall(page.read_text())) for page in pages}
    result = 0
    for path in pathlib.Path(lutjax.__file__).parent.rglob("*.py"):
        for source, following in re.findall(r"Source: (.*)(?:\n *(.*))?", path.read_text()):
            assert following in ("", '"""'), (
                f"{path}: {source}: {following} is taken for another page; leave a line blank"
            )
            for one in source.removesuffix(".").split("; "):
                parts = re.fullmatch(r"docs/([\w-]+\.md), sections? (\d+)(?: and (\d+))?", one)
                assert parts, f"{path}: {source}"
                page, *numbers = parts.groups()
                assert {n for n in numbers if n} <= sections.get(page, set()), f"{path}: {source}"
                result += 1
    assert result >= 60


def test_hashes_of_ngrams_are_those_of_the_page():
    """Evaluate the multiplier formula as Python: its operators are bitwise, so the numbers are odd."""
    text = (ROOT / "docs" / "semantics.md").read_text()
    formula = re.search(r"^    m\(n, head, j\) = (.*)$", text, re.MULTILINE)[1]
    names = {"mix": lambda h: _ngrams._mix(h % 2**32), "n": 3, "head": 5, "j": 2, "seed": 7}
    assert eval(formula, names) == _ngrams.multiplier(3, 5, 2, 7)
    assert eval(formula, {**names, "j": 1}) == _ngrams.multiplier(3, 5, 1, 7)


def test_gates_are_those_of_the_page():
    text = (ROOT / "docs" / "logic.md").read_text()
    rows = re.findall(r"\| (\d+) \| [\w ]+ \| ([-\d ]+) (?=\|)", text)
    page = {int(number): [int(c) for c in coefficients.split()] for number, coefficients in rows}
    assert [page[number] for number in range(16)] == lutjax.reference.GATES.tolist()


def test_the_dev_extra_has_the_dependency_groups():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tools = project["project"]["optional-dependencies"]["dev"]
    groups = project["dependency-groups"]
    assert not [
        tool for name in ("test", "lint", "kernels") for tool in groups[name] if tool not in tools
    ]


def test_the_smoke_tests_exist():
    lines = (ROOT / "tests" / "smoke.txt").read_text().splitlines()
    assert len(set(lines)) == len(lines) > 10
    for line in lines:
        path, _, test = line.partition("::")
        assert not test or re.search(
            rf"^def {test.split('[')[0]}\(", (ROOT / path).read_text(), re.MULTILINE
        ), line


def test_figures_of_the_readme_stand_where_it_says():
    rows = re.findall(
        r"^\| (.*) \| (.*) \| (.*) \| \[[\w ]+\]\((docs/[\w/.-]+)#[\w-]+\) \|$",
        README,
        re.MULTILINE,
    )
    assert len(rows) == 6
    for _, alternative, ours, page in rows:
        text = read(ROOT / page)
        for figure in re.findall(r"\d+\.\d+|\d{3} us", f"{alternative} {ours}"):
            assert re.search(rf"(?<![\d.]){figure}(?![\d.])", text), (page, figure)


@pytest.mark.parametrize("name", ["feed-forward", "choose", "columns"])
def test_figures_of_short_pages_stand_in_the_pages_that_they_link(name):
    page = ROOT / "docs" / f"{name}.md"
    text = page.read_text(encoding="utf-8")
    linked = [(page.parent / link) for link in re.findall(r"\]\(([\w/.-]+\.md)", text)]
    there = " ".join(read(other) for other in linked)
    figures = set(re.findall(r"(?<![\w.])\d+\.\d{2,}(?![\w.])", re.sub(r"`[^`]*`", "", text)))
    assert len(figures) > 1
    assert not {f for f in figures if not re.search(rf"(?<![\d.]){f}(?!\d)", there)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "platform", "device_kind"),
    [("pallas/tpu", "tpu", "TPU v6e"), ("pallas", "cuda", "NVIDIA H200")],
)
@pytest.mark.usefixtures("as_a_reader")
def test_pallas_kernels_are_exported_without_a_disabled_check(
    implementation, platform, device_kind
):
    """Check the claim in docs/implementations.md."""
    d = jax.eval_shape(lutjax.detect_signs, jax.ShapeDtypeStruct((16, 4, 5), "float32"))
    look_up = jax.jit(lambda w, d: lutjax.lookup(w, d, implementation=implementation))
    weights = jax.ShapeDtypeStruct((4, 32, 128), "float32")
    with _ahead_of_time.use_target(platform, device_kind):
        exported = jax.export.export(look_up, platforms=[platform])(weights, d)
    assert "custom_call" in exported.mlir_module()
