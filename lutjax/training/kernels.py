"""Descriptions of kernel implementations in a training step."""

from collections.abc import Sequence

from lutjax.dispatch.registry import Device, Made, Platform, kernel_registry

_WORDS = {
    Platform.NATIVE: "native code",
    Platform.TRITON: "Triton",
    Platform.PALLAS: "Pallas",
    Platform.XLA: "plain JAX",
}


def describe_implementations(calls: Sequence[Made], device: Device) -> list[str]:
    """Describe each op's implementation on a device.

    For each pure-JAX op, explain why faster kernels are unavailable.
    """
    found: dict[str, dict[str, None]] = {}
    against: dict[tuple[Platform, str], dict[str, None]] = {}
    for made in (made for made in calls if made.runs_on(device)):
        for direction, candidates in kernel_registry.considered(made, device).items():
            chosen = next(spec for spec, reason in candidates if reason is None)
            about = "" if chosen.about is None else f", {chosen.about()},"
            found.setdefault(f"{_WORDS[chosen.platform]}{about}", {}).setdefault(made.call.op)
            for spec, reason in candidates if chosen.platform is Platform.XLA else ():
                if spec is chosen:
                    break
                if spec.backend == device.backend and direction in spec.directions:
                    against.setdefault((spec.platform, str(reason)), {}).setdefault(made.call.op)
    if not found:
        return []
    by = [f"{name} for {_format_list(of_op)}" for name, of_op in found.items()]
    return [
        f"kernels: {'; '.join(by)}",
        *(
            f"no {_WORDS[p]} for {_format_list(of_op)}: {reason}"
            for (p, reason), of_op in against.items()
        ),
    ]


def _format_list(names: dict[str, None]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
