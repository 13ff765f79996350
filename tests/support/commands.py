"""The `lutjax` command, run within the test process."""

from click.testing import CliRunner

from lutjax.cli._main import cli


def command(*words, given=None):
    """Run `lutjax` with these words, formatted by `str`, and return the result; propagate uncaught exceptions.

    Args:
      given: standard input; empty by default.
    """
    result = CliRunner().invoke(cli, [str(word) for word in words], input=given)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def output(*words):
    """Run `lutjax` with these words, check that it succeeds, and return its output."""
    result = command(*words)
    assert result.exit_code == 0, result.output
    return result.output


def refusal(*words: object) -> str:
    """Run `lutjax` with these words, check that it fails, and return its output as one line."""
    result = command(*words)
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.replace("│", "").split())
