"""Numbers of examples that are drawn."""

from hypothesis import HealthCheck, Phase, settings


def bounded(examples: int, steps: int = 1) -> settings:
    """Number of examples, and of steps if they are sequences; the same in every run."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
