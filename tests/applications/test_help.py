"""Help and errors for all commands, and the commands' compilation cache folder."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import jax
import pytest
from commands import command, output
from small_runs import FOX

from lutjax.cli import _compiled, _run, main
from lutjax.cli._flags import Command, FieldsCommand, Finite, replace_fields
from lutjax.cli._main import cli
from lutjax.training import experiments
from lutjax.training.automaton_runs import Automaton
from lutjax.training.classifier_runs import Classifier
from lutjax.training.lm_runs import LanguageModel

FREE = [
    "--prompt", "--memory-base", "--target", "--id", "--exclude", "--encoding", "--name", "--format", "--inputs",
    "--coordinator", "--host", "--model-name", "--wiring", "--op", "--size", "--monotone", "--antitone", "--unused",
]  # fmt: skip
"""Free-form options without a fixed list of choices in click."""

KINDS = {"lm": LanguageModel, "classify": Classifier, "ca": Automaton}


def commands(group=cli, words=()):
    for name, one in group.commands.items():
        if isinstance(one, click.Group):
            yield from commands(one, (*words, name))
        else:
            yield " ".join((*words, name)), one


@pytest.mark.parametrize("words", [words for words, _ in commands()])
def test_every_option_is_described(words):
    one = dict(commands())[words]
    context = click.Context(one, info_name=words, show_default=True)
    text = output(*words.split(), "--help-all" if isinstance(one, FieldsCommand) else "--help")
    assert one.help
    for param in one.get_params(context):
        if not isinstance(param, click.Option) or param.hidden:
            continue
        name, (_, shown) = param.opts[0], param.get_help_record(context)
        described = re.sub(r"\[[^]]*\]", "", param.help or "").strip()
        assert 5 < len(described) < 75, name  # one line
        assert (
            described[0].isupper() or described[0] in "./" or described.split(":")[0].islower()
        ), described
        assert name in text.replace("--[no-]", "--")
        if not param.required and (not param.is_flag or param.secondary_opts):
            assert re.search("default", shown, re.IGNORECASE), f"{name} shows no default: {shown}"
        if isinstance(param.type, click.types.StringParamType):
            assert name in FREE, f"{name} shows no choices"
        if isinstance(param.type, click.types.FloatParamType | click.FloatRange):
            assert isinstance(param.type, Finite), f"{name} may be infinite or NaN"


@pytest.mark.parametrize("words", ["", "train", *(words for words, _ in commands())])
def test_help_fits_two_screens(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = command(*words.split(), "--help").output.splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 84  # long choices are not wrapped
    if words in ("", "train"):
        assert "..." not in "\n".join(lines[1:])  # no summary is cut


def test_sections_name_options():
    for words, one in commands():
        if isinstance(one, Command):
            options = {str(param.name) for param in one.get_params(click.Context(one))}
            shared = {"select_every", "huge_pages"} if isinstance(one, FieldsCommand) else set()
            assert set(one._headings) - shared <= options, words


ALONE = """
import json, sys
from lutjax.cli import main
for words, expected in json.loads(sys.argv[1]):
    sys.argv = ["lutjax", *words]
    try:
        main()
    except SystemExit as ended:
        status = ended.code or 0
    assert status == expected, (words, status)
    used = {"jax", "flax", "optax", "orbax", "matplotlib", "rich"} & set(sys.modules)
    assert not used, (words, used)
"""


def test_help_usage_errors_and_info_do_not_import_jax(table_run):
    lines = [
        *(f"{words} --help".split() for words, _ in commands()),
        ["--version"],
        ["train", "lm", "--help-all"],
    ]
    lines = [
        (words, 0)
        for words in [*lines, ["--help"], ["train", "--help"], ["info", str(table_run.out)]]
    ]
    lines += [
        (words.split(), 2) for words in ("train --nonsense", "train classify --steps many", "serve")
    ]
    ended = subprocess.run(
        [sys.executable, "-c", ALONE, json.dumps(lines)], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


def test_completion_does_not_import_jax():
    code = """if True:
        import sys; sys.argv = ["lutjax"]
        from lutjax.cli import main
        try: main()
        finally: assert "jax" not in sys.modules"""
    asked = {
        "_LUTJAX_COMPLETE": "bash_complete",
        "COMP_WORDS": "lutjax train lm --log-e",
        "COMP_CWORD": "3",
    }
    words, environment = [sys.executable, "-c", code], {**os.environ, **asked}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("plain,--log-every\n", "")


@pytest.mark.parametrize("kind", KINDS)
def test_shown_defaults_are_those_of_a_new_run(kind, tmp_path, without_typechecking):
    path = tmp_path / "fox.txt"
    path.write_bytes(FOX)
    one = cli.commands["train"].commands[kind]
    helps = {str(param.name): param.help for param in one.get_params(click.Context(one))}
    n_shown = 0
    for model in KINDS[kind].configs.models or (None,):
        source = {"lm": {"path": path, "model": model}, "classify": {"model": model}, "ca": {}}[
            kind
        ]
        record = KINDS[kind].create({}, **source).record
        for config in (
            record.model,
            record.training,
            KINDS[kind].configs.options(**record.options),
        ):
            for name, value in config.__dict__.items():
                result = re.search(r"\[default: (.*)\]$", helps.get(name) or "")
                if result is None:
                    continue
                usual, *others = result[1].split("; ")
                of_model = dict(other.split(": ") for other in others if ": " in other)
                shown = of_model.get(str(model), usual)
                if " " in shown or shown.startswith(
                    "--"
                ):  # it follows from the data or another option
                    continue
                if isinstance(value, bool):
                    value = "on" if value else "off"
                if "..." in shown:
                    assert shown == f"{value[0]},{value[1]},...,{value[-1]}", name
                    continue
                assert shown in (
                    ",".join(map(str, value)) if isinstance(value, tuple) else str(value),
                    *(("none", "all") if value in (None, ()) else ()),
                ), name
                n_shown += 1
    assert n_shown > 15


def wrong(option):
    """Return invalid values for an option, or none for free-form options."""
    if isinstance(option.type, click.Choice):
        return ["nonsense"]
    if isinstance(option.type, Finite):
        return ["nan", "1e300", "1e-300"] if option.type.max is None else ["nan"]
    return [] if option.is_flag or isinstance(option.type, click.types.StringParamType) else ["-1"]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_name_the_option(kind, tmp_path, monkeypatch, without_typechecking):
    monkeypatch.chdir(tmp_path)
    Path("fox.txt").write_bytes(FOX)
    one = cli.commands["train"].commands[kind]
    assert isinstance(one, FieldsCommand)
    n_refused = 0
    for option in one.get_params(click.Context(one)):
        if not isinstance(option, click.Option):
            continue
        if isinstance(option.type, click.Path) or option.name in ("mesh", "seed", "split"):
            continue
        words = ["--text", "fox.txt"] if kind == "lm" else []
        words += ["--model", option.models[0]] if getattr(option, "models", ()) else []
        for value in wrong(option):
            result = command("train", kind, option.opts[0], value, *words)
            assert result.exit_code == 2, (option.opts, result.output)
            last = result.output.splitlines()[-1]
            assert last.startswith("Error: "), result.output
            assert re.search(rf"{option.opts[0]}\b", last), result.output
            n_refused += 1
    assert n_refused > 10
    assert [path.name for path in tmp_path.iterdir()] == ["fox.txt"]


@pytest.mark.parametrize(("words", "option"), [
    (("lm", "--lut-bits", 28), ""),
    (("lm", "--batch-size", 10**12), ""),
    (("lm", "--batch-size", 10**12, "--dry-run"), ""),
    (("classify", "--batch-size", 10**12), ""),
    (("ca", "--experiment", "lizard", "--batch-size", 10**13), ""),
    (("classify", "--n-thresholds", 10**9), "--n-thresholds"),
    (("classify", "--n-thresholds", 10**9, "--model", "tree"), "--n-thresholds"),
    (("classify", "--layers", 10**12), "--layers"),
    (("classify", "--column-bits", 10**12), "--column-bits"),
    (("classify", "--steps", 10**30), "--steps"),
    (("ca", "--channels", 10**12), "--channels"),
    (("ca", "--perception", 10**12), "--perception"),
    (("ca", "--update", 10**30), "--update"),
    (("classify", "--select-every", 10**12), "--select-every"),
    (("classify", "--depth", 10**9, "--model", "tree"), "--depth"),
    (("lm", "--features", 10**12), "--features"),
    (("lm", "--n-layers", 10**9), "--n-layers"),
    (("lm", "--n-detectors", 2 * 10**9), "--n-detectors"),
])  # fmt: skip
def test_numbers_that_are_too_large_are_refused_at_once(
    words, option, tmp_path, monkeypatch, without_typechecking
):
    monkeypatch.chdir(tmp_path)
    Path("fox.txt").write_bytes(FOX)
    monkeypatch.setattr(experiments, "_train_and_finish", None)
    result = command("train", *words, *(("--text", "fox.txt") if words[0] == "lm" else ()))
    assert result.exit_code == (2 if option else 1), result.output
    last = result.output.splitlines()[-1]
    smaller = (
        r"the run needs at least [\d,.]+ GB: .* Choose a smaller model or a smaller --batch-size\."
    )
    assert re.match(f"Error: {option} is " if option else f"Error: {smaller}", last), result.output
    assert "heckpoint" not in last
    assert [path.name for path in tmp_path.iterdir()] == ["fox.txt"]


def test_sizes_that_no_memory_holds_are_named():
    with (
        pytest.raises(click.UsageError, match=r"^--layers is 8,4000, too large for this machine"),
        _run.too_large({"layers": (8, 4000), "candidates": 9, "tau": 1.0, "normal": True}),
    ):
        raise MemoryError
    with pytest.raises(ValueError, match="another"), _run.too_large({"layers": (8,)}):
        raise ValueError("another")


def test_options_in_place_of_fields():
    fields = ["features", "n_heads", "steps"]
    for text, expected in (
        ("steps is 0; it must be at least 1.", "--steps is 0; it must be at least 1."),
        ("it has n_heads.", "it has --n-heads."),
        (
            "see n_heads.py and --n-heads, model/n_heads",
            "see n_heads.py and --n-heads, model/n_heads",
        ),
        ("the steps is a word; steps is 3", "the steps is a word; --steps is 3"),
    ):
        assert replace_fields(text, fields) == expected
    assert replace_fields("steps is 0, n_heads is 1", []) == "steps is 0, n_heads is 1"


def settings(monkeypatch, switch, directory=None):
    """Return the JAX settings for a switch value, with and without a JAX cache directory."""
    told = {}
    monkeypatch.setenv(_compiled.SWITCH, switch)
    kept = jax.config.jax_compilation_cache_dir  # of the tests
    jax.config.update("jax_compilation_cache_dir", directory)
    with monkeypatch.context() as patched:
        patched.setattr(
            type(jax.config), "update", lambda self, name, value: told.update({name: value})
        )
        _compiled.keep_compiled()
    jax.config.update("jax_compilation_cache_dir", kept)
    return told


def test_the_switch(tmp_path, monkeypatch):
    folder = tmp_path / "programs"
    told = settings(monkeypatch, str(folder))
    assert Path(told["jax_compilation_cache_dir"]).parent == folder
    assert told["jax_persistent_cache_min_compile_time_secs"] == 0
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "3")
    assert set(settings(monkeypatch, str(folder))) == {"jax_compilation_cache_dir"}
    assert not settings(monkeypatch, "off")
    (tmp_path / "file").touch()
    assert not settings(monkeypatch, str(tmp_path / "file"))
    assert not settings(monkeypatch, "~nobody-of-this-name/programs")


def test_a_user_without_a_home(monkeypatch):
    """Commands run without a cache, as in a container with a numeric user id and no user name."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert not settings(monkeypatch, "")


def test_matplotlib_does_not_warn_of_its_own_caches(monkeypatch):
    logger = logging.getLogger("matplotlib")
    before = logger.level
    monkeypatch.setattr(sys, "argv", ["lutjax", "--version"])
    monkeypatch.setattr(_compiled, "keep_compiled", lambda: None)
    try:
        with pytest.raises(SystemExit):
            main()
        assert not logger.isEnabledFor(logging.WARNING)
    finally:
        logger.setLevel(before)


def test_a_directory_of_jax_stays(tmp_path, monkeypatch):
    assert not settings(monkeypatch, str(tmp_path), directory=str(tmp_path / "own"))
    assert not list(tmp_path.iterdir())


def test_the_oldest_programs_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(_compiled, "MOST_BYTES", 1000)
    for age in range(10):
        path = tmp_path / f"{age}-cache"
        path.write_bytes(bytes(100))
        os.utime(path, (1e9 - age, 1e9 - age))
    _compiled._make_room(tmp_path)
    assert len(list(tmp_path.iterdir())) == 10
    (tmp_path / "new").write_bytes(bytes(100))
    _compiled._make_room(tmp_path)
    kept = [*(f"{age}-cache" for age in range(4)), "new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


COMMAND = """
import sys, jax, lutjax
assert jax.config.jax_compilation_cache_dir is None, "import lutjax"
from lutjax.cli import main
sys.argv[1:] = ["explain", "margins"]
try:
    main()
except SystemExit:
    jax.jit(lambda x: x + 1)(1.0)
    print(jax.config.jax_compilation_cache_dir)
"""


def test_commands_keep_what_they_compile(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != _compiled.SWITCH}
    environment |= {
        "XDG_CACHE_HOME": str(tmp_path),
        "HOME": str(tmp_path),
        "LOCALAPPDATA": str(tmp_path),
    }
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    words = [sys.executable, "-c", COMMAND]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    folder = Path(done.stdout.splitlines()[-1])
    assert tmp_path in folder.parents
    assert folder.parts[-3:-1] == ("lutjax", "compiled")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert any(path.name.startswith("jit") for path in folder.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_help_on_a_full_disk():
    words = [sys.executable, "-m", "lutjax", "--help"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Error: No space left on device.")
    assert "Traceback" not in done.stderr
