"""Circuit test fixtures."""

import pytest


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Runs and their export folders, read-only."""
    import exported_runs
    from commands import output

    result = {}
    for kind, registers in (("digits", 3), ("automaton", 0)):
        folder = tmp_path_factory.mktemp(kind)
        if kind == "digits":
            run = exported_runs.write_classifier(folder, *exported_runs.images())
        else:
            run = exported_runs.write_automaton(folder)
        text = output("export", "--run", run, "--out", folder / "out", "--registers", registers)
        assert f"lutjax verify {folder / 'out'}" in text
        result |= {f"{kind} run": run, kind: folder / "out"}
    return result


@pytest.fixture(scope="session")
def trees(tmp_path_factory):
    """Tree run with its two-channel images."""
    import exported_runs

    return exported_runs.write_trees(tmp_path_factory.mktemp("trees"))


@pytest.fixture
def usable_tools(monkeypatch):
    """Restrict proofs to usable local tools."""
    import tools

    tools.hide_unusable(monkeypatch)


@pytest.fixture(scope="session")
def compiler():
    """C compiler with undefined-behavior checks."""
    import tools
    from c_programs import FLAGS

    tools.require_tool("cc", *FLAGS)
    return tools.c_compiler()


@pytest.fixture
def programs(compiler, tmp_path_factory):
    """Function to compile layers into one program."""
    import c_programs

    return lambda layers: c_programs.of_layers(tmp_path_factory.mktemp("layers"), layers)


@pytest.fixture(scope="session")
def rounded():
    """Integer language model."""
    from c_programs import model_of

    from lutjax.training.integers import Rounded

    return Rounded(model_of())


@pytest.fixture(scope="session")
def program(rounded, compiler, tmp_path_factory):
    """Compiled program for `rounded`."""
    import tools
    from c_programs import FLAGS

    return tools.compiled(tmp_path_factory.mktemp("program"), rounded.integer.to_c(), *FLAGS)
