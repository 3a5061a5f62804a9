"""The command line: one file a verb. `main` turns every refusal into one line on stderr and exit code 2."""

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Annotated, NoReturn

import typer

from anechain.errors import AnechainError

INTERRUPTED = 130  # what typer returns for a KeyboardInterrupt, and shells expect

# Spelled one by one, so that the imports can be read off the text. A verb's libraries are loaded when it is asked for:
# all of them together take longer to import than a model takes to load.
VERBS: dict[str, Callable[[], ModuleType]] = {
    "bake": lambda: import_module("anechain.cli.bake"),
    "gate": lambda: import_module("anechain.cli.gate"),
    "lint": lambda: import_module("anechain.cli.lint"),
    "plan": lambda: import_module("anechain.cli.plan"),
    "run": lambda: import_module("anechain.cli.run"),
    "chat": lambda: import_module("anechain.cli.chat"),
    "serve": lambda: import_module("anechain.cli.serve"),
    "eval": lambda: import_module("anechain.cli.eval"),
    "score": lambda: import_module("anechain.cli.score"),
    "bench": lambda: import_module("anechain.cli.bench"),
    "cost": lambda: import_module("anechain.cli.cost"),
    "ship": lambda: import_module("anechain.cli.ship"),
    "inspect": lambda: import_module("anechain.cli.inspect"),
    "merge": lambda: import_module("anechain.cli.merge"),
    "doctor": lambda: import_module("anechain.cli.doctor"),
    "demo": lambda: import_module("anechain.cli.demo"),
    "tune": lambda: import_module("anechain.cli.tune"),
}


def commands(names: Iterable[str] = VERBS) -> typer.Typer:
    """The command line with these verbs."""
    app = typer.Typer(name="anechain", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    for name in names:
        app.command()(getattr(VERBS[name](), name))
    app.callback(invoke_without_command=True)(anechain)
    return app


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
        asked = [word for word in sys.argv[1:2] if word in VERBS]
        code = commands(asked or VERBS)(prog_name="anechain", standalone_mode=False)
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
