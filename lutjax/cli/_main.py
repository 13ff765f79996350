"""Command definitions; JAX is imported lazily, so that ``--help`` responds at once."""

import click

from lutjax import __version__
from lutjax.cli._bench import bench
from lutjax.cli._errors import Commands
from lutjax.cli._explain import explain
from lutjax.cli._export import export
from lutjax.cli._flags import SETTINGS
from lutjax.cli._fpga import fpga
from lutjax.cli._generate import generate
from lutjax.cli._import import import_
from lutjax.cli._info import info
from lutjax.cli._predict import predict
from lutjax.cli._prove import prove
from lutjax.cli._quantize import quantize
from lutjax.cli._save import save
from lutjax.cli._serve import serve
from lutjax.cli._status import status
from lutjax.cli._train_ca import ca
from lutjax.cli._train_classify import classify, digits
from lutjax.cli._train_lm import lm
from lutjax.cli._tune import tune
from lutjax.cli._verify import verify


@click.group(cls=Commands, context_settings=SETTINGS)
@click.version_option(__version__)
def cli() -> None:
    """Lookup-table networks and differentiable logic for JAX."""


@cli.group()
def train() -> None:
    """Train a language model, a classifier or an automaton."""


for command in (ca, classify, digits, lm):
    train.add_command(command)
for command in (generate, quantize, predict, info, save, import_, serve):
    cli.add_command(command)
for command in (export, verify, prove, fpga):
    cli.add_command(command)
for command in (bench, status, explain, tune):
    cli.add_command(command)
