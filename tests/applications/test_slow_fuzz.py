"""Damaged files of every reader."""

import pytest
from file_readers import READERS, check

pytestmark = pytest.mark.usefixtures("without_typechecking")


@pytest.mark.parametrize("name", READERS)
def test_many_damaged_files(name, tmp_path):
    check(name, 1, 2000, tmp_path)
