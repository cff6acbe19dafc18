"""The command line. A user's mistake is one sentence on stderr and exit status 2, never a traceback."""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from shadowsync.errors import ConfigError, RunError, ShadowSyncError, lacks_memory, shortened

if TYPE_CHECKING:
    from shadowsync.inference import Trained
    from shadowsync.reference import Group

app = typer.Typer(
    help="Trains click models with background synchronisation: nobody waits.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_INTERRUPTED = 130
_REPEATED_S = 2.0
_NO_MEMORY = (
    "this machine does not give the memory that is needed: lower train.batch_size, data.slice_rows, data.prefetch, the "
    "number of trainers or the rows of the tables, or raise the limit (ulimit -v)"
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"shadowsync {version('shadowsync')}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Trains click models with background synchronisation: nobody waits."""


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.yaml] [key.path=value …]", help="A configuration file and overrides, in any order."
    ),
]
RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")]
DataPath = Annotated[
    str | None, typer.Option("--data", metavar="PATH", help="Rows to use instead of the run's test rows.")
]

Checkpoints = Annotated[
    str | None,
    typer.Option(
        "--checkpoints", metavar="PLACE", help="Where DIR has its checkpoints, if it names a place on another machine."
    ),
]

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="CLASS",
        help="package.module:Class that the run named as its model; it is run only if you name it here.",
    ),
]

Newest = Annotated[
    bool, typer.Option("--newest", help="Take the newest checkpoint, also where an earlier one was better.")
]


@app.command()
def train(
    settings: Overrides = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where results go; a new folder in runs/.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Go on from this run's newest checkpoint.")] = None,
    start_from: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Begin with what this run has learnt, on other rows (data.path=…)."),
    ] = None,
) -> None:
    """Train a model; with nothing else, the demo.

    A key is section.key on the command line, and stands below its section in the
    file. The sections: data (where rows come from), model (its layers),
    embedding (tables and their servers), train (trainers, batch, learning rate),
    sync (of replicas) or aggregation (gradient methods in its place),
    compression (of what crosses), recovery (what is saved and when),
    cluster (roles as processes on Ray), report (what is written).

    Every key with its default: shadowsync options, or docs/configuration.md.
    An unknown key is an error that names the nearest.
    """
    from shadowsync.job import train_from_command_line

    files = [Path(setting) for setting in settings or () if "=" not in setting]
    if len(files) > 1:
        raise ConfigError(
            f"one configuration file at most, not {' and '.join(map(str, files))}; overrides are key.path=value"
        )
    overrides = [setting for setting in settings or () if "=" in setting]
    train_from_command_line(files[0] if files else None, overrides, out, resume, start_from)


@app.command()
def evaluate(
    folder: RunFolder,
    data: DataPath = None,
    checkpoints: Checkpoints = None,
    newest: Newest = False,
    model: Model = None,
    measure: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Measured instead of train.measures; may be given several times."),
    ] = None,
) -> None:
    """Measure a trained model on its test rows, or on other rows."""
    from rich.console import Console

    from shadowsync.inference import Trained
    from shadowsync.report.reporter import quality_table

    trained = _said(Trained(folder, model, checkpoints, newest, measure))
    Console().print(quality_table(trained.evaluate(data)))
    for sentence in trained.remarks:
        typer.echo(sentence)


@app.command()
def predict(
    folder: RunFolder,
    data: Annotated[str, typer.Option("--data", metavar="PATH", help="Rows to predict.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write: .parquet or .csv.")],
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="A column of the rows to write beside; may be given several times."),
    ] = None,
    checkpoints: Checkpoints = None,
    newest: Newest = False,
    model: Model = None,
) -> None:
    """Write the predicted probability of each row, in the order of the rows."""
    from shadowsync.inference import Trained

    trained = _said(Trained(folder, model, checkpoints, newest))
    rows = trained.predict(data, out, keep or ())
    for sentence in trained.remarks:
        typer.echo(sentence, err=True)
    typer.echo(f"{rows} predictions written to {out}")


@app.command()
def export(
    folder: RunFolder,
    out: Annotated[Path, typer.Option("--out", metavar="MODEL", help="The file to write; with --since a folder.")],
    since: Annotated[
        str | None,
        typer.Option(metavar="CHECKPOINT", help="Only the embedding rows that changed since this checkpoint."),
    ] = None,
    checkpoints: Checkpoints = None,
    newest: Newest = False,
    model: Model = None,
) -> None:
    """Write the model with its tables as one file that torch alone loads, or what has changed of its rows."""
    if since is not None:
        if newest:
            raise ConfigError("--newest has no effect with --since, which takes the newest: leave it out")
        from shadowsync.runs import export_changes

        found = export_changes(folder, since, str(out), checkpoints)
        changed = sum(table["changed"] for table in found["tables"])
        typer.echo(f"{changed} rows that changed from {found['since']} to {found['until']} are in {out}")
        return
    from shadowsync.inference import Trained

    _said(Trained(folder, model, checkpoints, newest)).export(out)
    typer.echo(f"the model is in {out}: torch.export.load({str(out)!r}).module()")


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Folders of runs.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page to write; DIR/report.html, for several runs comparison.html here."),
    ] = None,
) -> None:
    """Make the report page of a run again, or compare several runs."""
    from rich.console import Console

    from shadowsync.report import compare, page

    if len(folders) == 1:
        from shadowsync.runs import only_writer

        with only_writer(folders[0]) if out is None and folders[0].is_dir() else contextlib.nullcontext():
            compare.remake_page(folders[0], path := out or folders[0] / page.FILE_NAME)
        typer.echo(f"report: {path}")
        return
    runs = compare.read_runs(folders)
    compare.write_comparison(runs, path := out or Path(compare.FILE_NAME))
    Console().print(compare.comparison_table(runs))
    for notice in compare.notices(runs):
        typer.echo(notice)
    typer.echo(f"comparison: {path}")


@app.command()
def drain(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run that is going on.")],
    machines: Annotated[
        list[str], typer.Argument(metavar="MACHINE…", help="Their names or ids, as DIR/roles.json has them.")
    ],
    stay: Annotated[bool, typer.Option("--stay", help="They are not to be shut down after all.")] = False,
    wait_s: Annotated[float, typer.Option("--wait-s", min=0, help="How long to wait until they are empty.")] = 3600.0,
) -> None:
    """Empty machines that are to be shut down: what a run has there moves elsewhere while it trains."""
    from shadowsync.draining import ask_to_leave, wait_until_left

    wanted = ask_to_leave(folder, machines, stay)
    typer.echo(f"to be emptied: {', '.join(wanted) or 'none'}")
    if stay:
        return
    if left := wait_until_left(folder, machines, wait_s):
        raise RunError(f"{', '.join(left)} are still there; {folder}/events.jsonl says what was tried")
    typer.echo(f"no role of the run is on {', '.join(machines)} any more")


class _Data(TyperGroup):
    """`data NAME …` is `data write NAME …`, as it was before there was another command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = not args or args[0] in self.commands or args[0] == "--help"
        return super().parse_args(ctx, args if known else ["write", *args])


def _group(name: str, says: str, kind: type[TyperGroup] = TyperGroup) -> typer.Typer:
    """A group of commands, `shadowsync NAME …`."""
    group = typer.Typer(help=says, no_args_is_help=True, cls=kind)
    app.add_typer(group, name=name)
    return group


sources = _group("data", "Say what is in the columns of a file, or write the rows of a source as parquet.", _Data)


@sources.command("write")
def write_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The source.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The parquet file to write.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[data.key=value …]", help="Options of the source.")
    ] = None,
) -> None:
    """Write the rows of a source as a parquet file that the parquet source reads; `write` may be left out."""
    from shadowsync.inference import export_data

    typer.echo(export_data(name, settings or [], out), nl=False)


@sources.command("inspect")
def inspect_data(
    path: Annotated[
        str, typer.Argument(metavar="FILE", help="The rows: a file, a glob, a URL, or a folder with data.name=csv.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value …]", help="What is not as it looks: data.label=seen data.columns.age=dense"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="YAML", help="Where the configuration goes; left out, it is shown.")
    ] = None,
) -> None:
    """Show the columns of a file, their distinct values, nulls and bounds and what each would become, and write the
    configuration that trains on them so."""
    from rich.console import Console

    from shadowsync.preparing import inspected, write_yaml

    table, lines = inspected(path, settings or [])
    Console(stderr=out is None).print(table)
    if out is None:
        typer.echo(lines, nl=False)
    else:
        write_yaml(lines, out)
        typer.echo(f"the configuration is in {out}: shadowsync train {out}")


@app.command()
def models() -> None:
    """List the models, a line each; their options: shadowsync options model."""
    from shadowsync.reference import members_of

    _list(group for group in members_of("model.name"))


@app.command()
def methods() -> None:
    """List the methods that merge replicas or gradients, and when, a line each."""
    from shadowsync.reference import METHODS, members_of

    _list(group for key in METHODS for group in members_of(key))


@app.command("options")
def show_options(
    path: Annotated[
        str, typer.Argument(metavar="[PATH]", help="A section, a key or a choice: train, train.lr, model.name=dcn.")
    ] = "",
) -> None:
    """Say what can be configured at PATH, with types, defaults and meanings; without it everything."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from shadowsync.reference import groups_at

    console = Console()
    for group in groups_at(path):
        console.print(f"[bold]{escape(group.title)}[/bold]  {escape(group.says)}", highlight=False)
        if group.options:
            table = Table("key", "type", "default", "meaning", box=None, pad_edge=False, padding=(0, 2, 0, 0))
            for option in group.options:
                cells = (option.name, option.kind.replace("`", ""), option.default, option.meaning)
                table.add_row(*map(escape, cells))
            console.print(table)
        console.print()


def _list(groups: "Iterable[Group]") -> None:
    """Titles and what each is, as far as there is room on a line."""
    from rich.console import Console
    from rich.text import Text

    console, listed = Console(), list(groups)
    width = 2 + max(len(group.title) for group in listed)
    for group in listed:
        console.print(Text(f"{group.title:<{width}}{group.says}"), no_wrap=True, overflow="ellipsis", highlight=False)


plans = _group("plan", "Say what a job would cost before it runs.")


@plans.command("recovery")
def plan(  # noqa: PLR0913 (each is an option of the command)
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="A run or its checkpoints, for what is not given.")
    ] = None,
    *,
    save_s: Annotated[float | None, typer.Option(help="Seconds that training loses to a save of everything.")] = None,
    load_s: Annotated[float | None, typer.Option(help="Seconds to load after a failure; as long as a save.")] = None,
    restart_s: Annotated[float | None, typer.Option(help="Seconds until a replacement can load.")] = None,
    fail_s: Annotated[float | None, typer.Option(help="Mean seconds between failures; 28 hours.")] = None,
    servers: Annotated[int | None, typer.Option(min=1, help="Embedding servers.")] = None,
    lost_servers: Annotated[float | None, typer.Option(help="Servers that one failure takes, on average; 1.")] = None,
    target_pls: Annotated[float | None, typer.Option(help="Portion of samples that may be lost; 0.1.")] = None,
    hours: Annotated[float | None, typer.Option(help="Length of the job.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of the tables that are saved by priority.")] = None,
    dim: Annotated[int | None, typer.Option(min=1, help="Width of these rows.")] = None,
    share: Annotated[float | None, typer.Option(help="Share of the rows in a save by priority; 0.125.")] = None,
) -> None:
    """Compare full with partial recovery: time between saves, overhead, lost samples, memory."""
    from rich.console import Console

    from shadowsync.planning import plan_recovery, plan_tables

    planned = plan_recovery(
        folder,
        save_s=save_s,
        load_s=load_s,
        restart_s=restart_s,
        fail_s=fail_s,
        servers=servers,
        lost_servers=lost_servers,
        target_pls=target_pls,
        hours=hours,
        rows=rows,
        dim=dim,
        share=share,
    )
    console = Console()
    for part in plan_tables(planned):
        console.print(part)


def _said(trained: "Trained") -> "Trained":
    """The model, with a word on what could not be loaded of it."""
    for sentence in trained.skipped:
        typer.echo(sentence, err=True)
    return trained


def main() -> None:
    """Entry point: runs the command and turns every expected error into a sentence and an exit status."""
    with _ended_by_signals():
        status, message = _run()
        if status == _INTERRUPTED:  # at once, also where threads still compute, which would abort the interpreter's end
            typer.echo(f"shadowsync: {message}", err=True)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    stream.flush()
            os._exit(_INTERRUPTED)
    if message:  # a command without arguments has shown its help
        typer.echo(f"shadowsync: {message}", err=True)
    sys.exit(status)


def _run() -> tuple[int, str]:
    """Runs the command; its exit status, and what is to be said about it."""
    try:
        status = app(standalone_mode=False)
    except ShadowSyncError as error:
        return error.exit_status, str(error)
    except TyperException as error:
        return 2, shortened(error.format_message())
    except (typer.Abort, KeyboardInterrupt):
        status = _INTERRUPTED
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        return 1, _NO_MEMORY
    return status or 0, "interrupted" if status == _INTERRUPTED else ""  # what typer makes of a KeyboardInterrupt


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does, so that it takes away what is half-written; training saves first.

    What is repeated within `_REPEATED_S` does not interrupt that end.
    """
    interrupted_at = -math.inf

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted_at
        if time.monotonic() > interrupted_at + _REPEATED_S:
            interrupted_at = time.monotonic()
            signal.default_int_handler(number, frame)

    usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    here = threading.current_thread() is threading.main_thread()
    changed = {number: usual[number] for number in usual if here and signal.getsignal(number) == usual[number]}
    for number in changed:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, before in changed.items():
            signal.signal(number, before)


if __name__ == "__main__":
    main()
