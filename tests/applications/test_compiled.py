"""The folder in which commands keep what they compile."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from lutjax.cli import _compiled, main


def settings(monkeypatch, switch, directory=None):
    """Return the settings that JAX gets with a value of the switch, where JAX itself uses a cache directory or none."""
    told = {}
    monkeypatch.setenv(_compiled.SWITCH, switch)
    kept = jax.config.jax_compilation_cache_dir  # of the tests
    jax.config.update("jax_compilation_cache_dir", directory)
    with monkeypatch.context() as patched:
        patched.setattr(type(jax.config), "update", lambda self, name, value: told.update({name: value}))
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
    """Nothing is kept, and commands run, as in a container whose user is a number without a name."""

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
    """Programs lie in the cache folder of the user's system; `import lutjax` alone keeps none."""
    environment = {name: value for name, value in os.environ.items() if name != _compiled.SWITCH}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path), "LOCALAPPDATA": str(tmp_path)}
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
