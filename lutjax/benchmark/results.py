"""Measurement results with machine facts and recorded figures."""

import csv
import dataclasses
import datetime
import functools
import importlib.resources
import platform
from typing import Any

import jax
import jaxlib

import lutjax
from lutjax.benchmark.measure import Timing, copy_bandwidth
from lutjax.benchmark.measurements import Measurement


@dataclasses.dataclass(frozen=True)
class Machine:
    """Machine facts.

    Attributes:
      device: device kind.
      bandwidth: copy bandwidth in bytes per second, reads plus writes.
      date: ISO 8601 date.
    """

    device: str
    bandwidth: float
    jax: str = jax.__version__
    jaxlib: str = jaxlib.__version__
    lutjax: str = lutjax.__version__
    python: str = platform.python_version()
    date: str = ""

    @classmethod
    def measure_default(cls) -> "Machine":
        """Return the default device, with its bandwidth measured now."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return cls(jax.devices()[0].device_kind, copy_bandwidth(), date=today)

    def __str__(self) -> str:
        return (
            f"{self.device}; a copy moves {self.bandwidth / 1e9:,.1f} GB/s; lutjax {self.lutjax}, "
            f"jax {self.jax}, jaxlib {self.jaxlib}, Python {self.python}"
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """Measurement with its result.

    Attributes:
      timing: None if it could not run, with a reason in `note`.
    """

    machine: Machine
    measurement: Measurement
    timing: Timing | None
    note: str = ""

    def __str__(self) -> str:
        measurement = self.measurement
        time = self.note if self.timing is None else duration(self.timing.p50)
        return (
            f"{measurement.name}, {measurement.row}, {measurement.implementation}, "
            f"{measurement.dtype}: {time}"
        )

    @property
    def limit(self) -> float:
        """Lower bound in seconds: required traffic at copy bandwidth."""
        return self.measurement.bytes_moved / self.machine.bandwidth

    @property
    def ratio(self) -> float | None:
        """Time over limit."""
        return None if self.timing is None else self.timing.p50 / self.limit

    @property
    def cuda(self) -> "Recorded | None":
        """Recorded CUDA runtime figure for this device kind, or None."""
        key = (
            self.measurement.name,
            self.measurement.row,
            self.measurement.dtype,
            self.machine.device,
        )
        return load_recorded_figures().get(key)

    def record(self) -> dict[str, Any]:
        """Return a CSV record: times in seconds, sizes in bytes."""
        measurement, timing, cuda = self.measurement, self.timing, self.cuda
        return {
            "shape": measurement.name,
            "sizes": str(measurement.shape),
            "row": measurement.row,
            "implementation": measurement.implementation,
            "kernels": measurement.kernel_names,
            "dtype": measurement.dtype,
            "p20_s": timing and timing.p20,
            "p50_s": timing and timing.p50,
            "p80_s": timing and timing.p80,
            "bytes": measurement.bytes_moved,
            "bandwidth_bytes_per_s": self.machine.bandwidth,
            "limit_s": self.limit,
            "ratio": self.ratio,
            "peak_bytes": timing and timing.peak_bytes,
            "table_bytes": measurement.table_bytes,
            "cuda_s": cuda and cuda.seconds,
            "cuda_peak_bytes": cuda and cuda.peak_bytes,
            "device": self.machine.device,
            "jax": self.machine.jax,
            "jaxlib": self.machine.jaxlib,
            "lutjax": self.machine.lutjax,
            "python": self.machine.python,
            "date": self.machine.date,
            "note": self.note,
        }


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Recorded CUDA runtime figure."""

    seconds: float
    peak_bytes: int | None


@functools.cache
def load_recorded_figures() -> dict[tuple[str, str, str, str], Recorded]:
    """Return CUDA runtime figures by shape, row, dtype and device kind."""
    text = importlib.resources.files("lutjax.benchmark").joinpath("data/cuda.csv").read_text()
    return {
        (r["shape"], r["row"], r["dtype"], r["device"]): Recorded(
            float(r["microseconds"]) / 1e6, int(r["peak_bytes"]) if r["peak_bytes"] else None
        )
        for r in csv.DictReader(text.splitlines())
    }


def run_measurement(machine: Machine, measurement: Measurement, **options: Any) -> Result:
    """Run a measurement. Out of memory, the result has a note instead of times.

    Args:
      machine: the machine, stored in the result.
      measurement: the measurement.
      **options: see `lutjax.benchmark.measure.device_time`.
    """
    try:
        return Result(machine, measurement, measurement.measure(**options))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Result(machine, measurement, None, "out of memory")


def duration(*seconds: float) -> str:
    """Return times with three digits and a unit.

    Example:
      >>> from lutjax.benchmark.results import duration
      >>> duration(0.0123), duration(0.00098, 0.00123)
      ('12.3 ms', '980-1230 us')
    """
    return _text(seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6})


def size(n_bytes: int) -> str:
    """Return a size with three digits and a unit.

    Example:
      >>> from lutjax.benchmark.results import size
      >>> size(536_870_912)
      '537 MB'
    """
    return _text((float(n_bytes),), {"GB": 1e9, "MB": 1e6, "kB": 1e3})


def _text(values: tuple[float, ...], units: dict[str, float]) -> str:
    name = next((n for n, unit in units.items() if values[0] >= unit), list(units)[-1])
    scaled = [value / units[name] for value in values]
    digits = 2 if scaled[0] < 10 else 1 if scaled[0] < 100 else 0
    return f"{'-'.join(f'{value:.{digits}f}' for value in scaled)} {name}"
