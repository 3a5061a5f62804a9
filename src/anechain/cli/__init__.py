"""The command line: one file a verb. `main` turns every refusal into one line on stderr and exit code 2."""

import sys
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from anechain.cli import (
    bake,
    bench,
    chat,
    cost,
    demo,
    doctor,
    eval,
    gate,
    inspect,
    lint,
    merge,
    plan,
    run,
    score,
    serve,
    ship,
    tune,
)
from anechain.errors import AnechainError

INTERRUPTED = 130  # what typer returns for a KeyboardInterrupt, and shells expect

app = typer.Typer(name="anechain", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
VERBS = (bake, gate, lint, plan, run, chat, serve, eval, score, bench, cost, ship, inspect, merge, doctor, demo, tune)
for verb in VERBS:
    app.command()(getattr(verb, verb.__name__.rpartition(".")[2]))


@app.callback(invoke_without_command=True)
def anechain(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="show the version and exit")] = False,
) -> None:
    """Bakes a decoder LLM into a chain of Core ML packages, proves that it says what the original says, and runs it."""
    if show_version:
        print(f"anechain {version('anechain')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Exit codes: 0 done, 1 judged and found wanting, 2 could not be done, 130 interrupted."""
    try:
        code = app(prog_name="anechain", standalone_mode=False)
    except AnechainError as error:
        _refuse(str(error))
    except typer.TyperException as error:
        _refuse(f"{error.format_message().rstrip('.')} (see `anechain --help`).")
    except OSError as error:  # a path that the system itself refuses, wherever it was met
        _refuse(f"{error.filename}: {error.strerror}." if error.filename else f"{error}.")
    if code == INTERRUPTED:
        _refuse("interrupted.", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(message: str, code: int = 2) -> NoReturn:
    print(f"anechain: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
