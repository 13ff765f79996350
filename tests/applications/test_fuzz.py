"""Damaged files of two readers; test_slow_fuzz.py has all readers."""

import pytest


@pytest.mark.usefixtures("without_typechecking")
@pytest.mark.parametrize("name", ["run, lm", "config, table"])
def test_damaged_files(name, tmp_path):
    import file_readers  # takes a second

    file_readers.check(name, 0, 10, tmp_path)


def test_memory_is_documented():
    import file_readers

    for reader in file_readers.READERS.values():
        assert f"at most {reader.times:,} times the memory of" in " ".join(
            reader.says.__doc__.split()
        )
