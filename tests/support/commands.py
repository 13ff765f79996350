"""The command `lutjax`, run in the process of the tests."""

from click.testing import CliRunner

from lutjax.cli._main import cli


def command(*words, given=None):
    """Return the result of `lutjax` with these words, written by `str`; raise what the command lets through.

    Args:
      given: the standard input; nothing by default.
    """
    result = CliRunner().invoke(cli, [str(word) for word in words], input=given)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def output(*words):
    """Return what `lutjax` prints with these words, after checking that it succeeds."""
    result = command(*words)
    assert result.exit_code == 0, result.output
    return result.output


def refusal(*words: object) -> str:
    """Return on one line what `lutjax` prints with these words, after checking that it fails."""
    result = command(*words)
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.replace("│", "").split())
