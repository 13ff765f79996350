"""Bytes of an answer as text: whole characters alone, and nothing from a stop on."""

import codecs


class Answer:
    r"""Text of an answer, as its bytes come.

    Args:
      stops: texts before which it ends.

    Attributes:
      stopped: whether one of them came.

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
        """Return the text that is sure now.

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
        n = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of a text a stop may begin with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
