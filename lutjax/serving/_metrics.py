"""Server metrics, in the text format of monitoring systems."""

import threading
from collections import Counter
from collections.abc import Mapping


class Metrics:
    """Request and token counts, and request durations in seconds."""

    def __init__(self) -> None:
        # Handlers run in several threads, and adding to a counter is not atomic.
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        with self._lock:
            self._requests[path, status] += 1
            self._seconds[path] += seconds  # type: ignore[assignment]

    def tokens(self, kind: str, number: int) -> None:
        """Count prompt bytes, answer bytes, or rows."""
        with self._lock:
            self._tokens[kind] += number

    def text(self, now: Mapping[str, float | int]) -> str:
        """Return all metrics as text.

        Args:
          now: gauge values by name.
        """
        with self._lock:
            lines = ["# TYPE lutjax_requests_total counter"]
            for (path, status), n in sorted(self._requests.items()):
                lines.append(f'lutjax_requests_total{{path="{path}",status="{status}"}} {n}')
            lines.append("# TYPE lutjax_request_seconds_total counter")
            lines += [
                f'lutjax_request_seconds_total{{path="{path}"}} {s:.6f}'
                for path, s in sorted(self._seconds.items())
            ]
            lines.append("# TYPE lutjax_items_total counter")
            lines += [
                f'lutjax_items_total{{kind="{kind}"}} {n}'
                for kind, n in sorted(self._tokens.items())
            ]
        for name, value in now.items():
            lines += [f"# TYPE lutjax_{name} gauge", f"lutjax_{name} {value:g}"]
        return "\n".join(lines) + "\n"
