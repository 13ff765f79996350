"""``lutjax explain``: the selected implementation of a call, and reasons against other ones."""

import click

from lutjax.cli._flags import Command
from lutjax.names import FLOATS, Backend, Platform


@click.command(cls=Command)
@click.argument("ops", metavar="[OP]...", nargs=-1)
@click.option(
    "--size",
    help="Named op size; an unknown name lists them.  [default: first size of `status` or `bench`]",
)
@click.option(
    "--dtype",
    type=click.Choice([*FLOATS, "uint32"]),
    help="Input dtype.  [default: first dtype of the op]",
)
@click.option(
    "--implementation",
    type=click.Choice(
        [
            *map(str, Platform),
            *(f"{platform}/{backend}" for platform in Platform for backend in Backend),
        ]
    ),
    metavar=f"[{'|'.join(Platform)}][/{'|'.join(Backend)}]",
    help="Implementation to explain.  [default: automatic]",
)
def explain(
    ops: tuple[str, ...], size: str | None, dtype: str | None, implementation: str | None
) -> None:
    """Explain which implementation runs each op here, and why.

    OP is an op or a function of ops, such as lut. The default is all ops. Nothing is computed.
    In Python, lutjax.explain explains a call with your own arguments.
    """
    import lutjax
    from lutjax import cases, kernel_registry
    from lutjax.benchmark import compositions, measurements

    for op in ops or kernel_registry.ops():
        try:
            # Shapes are enough: nothing is computed, and tables may be large.
            if op in kernel_registry.compositions():
                arguments, options = compositions.abstract_arguments(op, size, dtype)
            else:
                module = cases.find_module(op)
                case = module.case(size or module.tagged(cases.Tag.DTYPES)[0], dtype)
                arguments, options = measurements.abstract_arguments(case)
            text = lutjax.explain(op, *arguments, implementation=implementation, **options)
        except (ValueError, TypeError) as error:
            raise click.UsageError(str(error)) from error
        click.echo(text)
