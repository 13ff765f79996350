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
    # Dicts in place of sets keep the order of the calls.
    ops_by_name: dict[str, dict[str, None]] = {}
    against: dict[tuple[Platform, str], dict[str, None]] = {}
    for made in calls:
        if not made.runs_on(device):
            continue
        for direction, candidates in kernel_registry.considered(made, device).items():
            chosen = next(spec for spec, reason in candidates if reason is None)
            about = "" if chosen.about is None else f", {chosen.about()},"
            ops_by_name.setdefault(f"{_WORDS[chosen.platform]}{about}", {}).setdefault(made.call.op)
            for spec, reason in candidates if chosen.platform is Platform.XLA else ():
                if spec is chosen:  # later candidates would not have been faster
                    break
                if spec.backend == device.backend and direction in spec.directions:
                    against.setdefault((spec.platform, str(reason)), {}).setdefault(made.call.op)
    if not ops_by_name:
        return []
    by = [f"{name} for {_format_list(ops)}" for name, ops in ops_by_name.items()]
    lines = [f"kernels: {'; '.join(by)}"]
    for (platform, reason), ops in against.items():
        lines.append(f"no {_WORDS[platform]} for {_format_list(ops)}: {reason}")
    return lines


def _format_list(names: dict[str, None]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
