"""Damaged files of every reader."""

import pytest
from file_readers import READERS, check

pytestmark = pytest.mark.usefixtures("without_typechecking")


@pytest.mark.parametrize("name", READERS)
def test_many_damaged_files(name, tmp_path):
    check(name, 1, 2000, tmp_path)


def test_memory_is_documented():
    for reader in READERS.values():
        assert f"at most {reader.times:,} times the memory of" in " ".join(
            reader.says.__doc__.split()
        )
