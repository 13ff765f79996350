"""Answer bytes as text: complete characters only, up to a stop sequence."""

import codecs


class Answer:
    r"""Answer text, decoded incrementally.

    Args:
      stops: stop sequences.

    Attributes:
      stopped: whether a stop sequence occurred.

    Example:
      >>> from lutjax.serving._text import Answer
      >>> answer = Answer(("END",))
      >>> answer.add(b"caf\xc3"), answer.add(b"\xa9 EN"), answer.add(b"D more"), answer.stopped
      ('caf', 'é ', '', True)
    """

    def __init__(self, stops: tuple[str, ...]):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops, self._held, self.stopped = stops, "", False

    def add(self, part: bytes, *, last: bool = False) -> str:
        """Return the newly final text.

        Args:
          last: whether no bytes follow.
        """
        if self.stopped:
            return ""
        text = self._held + self._decoder.decode(part, final=last)
        ends = [text.find(stop) for stop in self._stops if stop in text]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        # Keep what may become a stop sequence, since sent text cannot be taken back.
        n = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]


def _overlap(text: str, stop: str) -> int:
    """Return the number of final characters in a text that may begin a stop sequence."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
