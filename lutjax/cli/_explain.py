"""``lutjax explain``: which implementation runs a call here, and why not another."""

import click

from lutjax.dispatch.registry import Backend, Platform
from lutjax.values._dtypes import FLOATS


@click.command()
@click.argument("ops", metavar="[OP]...", nargs=-1)
@click.option(
    "--size",
    help="A named size of the ops, as the message about an unknown one lists them. Default: the size that `status` checks; of a function that calls ops the "
    "first one that `bench` measures.",
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
    """Print which implementation runs the ops OP on this machine, in each direction, and the reason against each other one.

    OP is an op, or a function that calls ops, such as lut. Without OP all ops are explained. Nothing is computed. lutjax.explain does the same for
    your own arguments.
    """
    import lutjax
    from lutjax import cases, kernel_registry
    from lutjax.benchmark import compositions, measurements

    for op in ops or kernel_registry.ops():
        try:
            if op in kernel_registry.compositions():
                arguments, options = compositions.given(op, size, dtype)
            else:
                module = cases.of(op)
                case = module.case(size or module.tagged(cases.Tag.DTYPES)[0], dtype)
                arguments, options = measurements.given(case)
            text = lutjax.explain(op, *arguments, implementation=implementation, **options)
        except (ValueError, TypeError) as error:
            raise click.UsageError(str(error)) from error
        click.echo(text)
