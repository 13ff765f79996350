"""``lutjax explain``: which implementation runs a call here, and why not another."""

import click

from lutjax.dispatch.registry import Backend, Platform
from lutjax.values._dtypes import FLOATS


@click.command()
@click.argument("ops", metavar="[OP]...", nargs=-1)
@click.option(
    "--size",
    help="A named size of the ops, as the message about an unknown one lists them. Default: that of the checks of `status`.",
)
@click.option(
    "--dtype",
    type=click.Choice([*FLOATS, "uint32"]),
    help="Of the numbers. Default: the first of the op, mostly float32.",
)
@click.option(
    "--implementation",
    type=click.Choice(
        [*map(str, Platform), *(f"{platform}/{backend}" for platform in Platform for backend in Backend)]
    ),
    metavar=f"[{'|'.join(Platform)}][/{'|'.join(Backend)}]",
    help="What is asked for. Default: none, as in a call without implementation=.",
)
def explain(ops: tuple[str, ...], size: str | None, dtype: str | None, implementation: str | None) -> None:
    """Say which implementation runs the ops OP on this machine, in each direction, and the reason against each other one.

    Without OP all ops are explained. Nothing is computed. It is lutjax.explain for arguments of a named size; that takes arguments of yours.
    """
    import lutjax
    from lutjax import cases, kernel_registry
    from lutjax.benchmark import measurements

    for op in ops or kernel_registry.ops():
        try:
            module = cases.of(op)
            case = module.case(size or module.tagged(cases.Tag.DTYPES)[0], dtype)
            arguments, options = measurements.given(case)
            text = lutjax.explain(op, *arguments, implementation=implementation, **options)
        except (ValueError, TypeError) as error:
            raise click.UsageError(str(error)) from error
        click.echo(text)
