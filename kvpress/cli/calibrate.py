# SPDX-License-Identifier: Apache-2.0
"""`kvpress calibrate METHOD`: fit the file of a calibrated method to a model.

Every calibration method is a subcommand. Its options are those of all methods and the fields of its settings class.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from typer.core import TyperGroup

from kvpress.calibrate.listing import ListedMethod, ListedSetting, listed_methods
from kvpress.cli.console import Device, ModelKwargs, shown
from kvpress.cli.console import tokens as token_count
from kvpress.cli.outputs import check_outputs
from kvpress.core.registry import nearest

if TYPE_CHECKING:
    from kvpress.calibrate.run import CalibrationSettings


class MethodGroup(TyperGroup):
    """Group with a subcommand for every calibration method, made from the sources when it is first needed."""

    _methods: dict[str, ListedMethod] | None = None

    @property
    def methods(self) -> dict[str, ListedMethod]:
        """The calibration methods by name."""
        if self._methods is None:
            self._methods = listed_methods()
        return self._methods

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.methods)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.methods:
            return None
        self.commands.setdefault(cmd_name, method_command(self.methods[cmd_name]))
        return self.commands[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name.startswith("-"):
            ctx.fail(
                f"the method comes before its options, got {name}: kvpress calibrate METHOD --model ... --data ... --out ..."
            )
        if name not in self.methods:
            ctx.fail(f"unknown method {name!r}{nearest(name, self.methods)}; `kvpress calibrate -h` lists all")
        return super().resolve_command(ctx, args)


def method_command(method: ListedMethod) -> Any:
    """Return the command of one calibration method."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    def run(
        *,
        model: Annotated[str, typer.Option(help="`reference`, a folder or a hub name.")],
        data: Annotated[
            list[str],
            typer.Option(
                help="A .jsonl file with `text`, any text file, or a dataset; may be repeated. The next one is read if those "
                "before it hold too few texts."
            ),
        ],
        out: Annotated[Path, typer.Option(help="The file to write.")],
        sequences: Annotated[int, typer.Option(help="Sequences to read.", min=1)] = 16,
        tokens: Annotated[int, token_count("tokens", "Tokens in each sequence.", least=16)] = 2048,
        device: Device = "auto",
        model_kwargs: ModelKwargs = None,
        force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
        **settings: Any,
    ) -> None:
        with shown(output=out):
            calibrate_model(
                model, data, out, _settings(method, settings), sequences, tokens, device, force, model_kwargs
            )

    signature = inspect.signature(run, eval_str=True)
    common = [item for item in signature.parameters.values() if item.kind is not item.VAR_KEYWORD]
    own = [_parameter(setting) for setting in method.settings]
    run.__signature__ = signature.replace(parameters=[*common[:3], *own, *common[3:]])  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in (*common, *own)}
    text = "\n\n".join(filter(None, (method.summary, method.description)))
    app.command(method.name, help=text, context_settings={"help_option_names": ["-h", "--help"]})(run)
    return typer.main.get_command(app)


def _parameter(setting: ListedSetting) -> inspect.Parameter:
    """Return the parameter of a command function that sets a field of a settings class."""
    default: Any = setting.default
    kind: Any = type(default)
    about = setting.help
    if setting.choices:
        kind = Literal[setting.choices]
    elif isinstance(default, tuple):
        about = f"{about.removesuffix('.')}: {_expected(default)}."
        kind, default = str, ",".join(map(str, default))
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, typer.Option(help=about)],
    )


def _settings(method: ListedMethod, values: dict[str, Any]) -> CalibrationSettings:
    """Return the settings of a method from the values of its options."""
    from kvpress.calibrate import METHODS

    for setting in method.settings:
        if isinstance(setting.default, tuple):
            values[setting.name] = _numbers(setting.name, values[setting.name], setting.default)
    settings: CalibrationSettings = METHODS[method.name](**values)
    return settings


def calibrate_model(
    model: str,
    data: list[str],
    out: Path,
    settings: CalibrationSettings,
    sequences: int,
    tokens: int,
    device: str,
    force: bool,
    model_kwargs: str | None = None,
) -> None:
    """Load a model, read texts and write the calibration file, with a progress bar.

    Args:
        model: name or folder of the model.
        data: files and names of texts.
        out: file to write.
        settings: method and its settings.
        sequences: sequences to read.
        tokens: tokens in each sequence.
        device: `auto`, `cpu`, `cuda` or `cuda:1`.
        force: replaces an existing file.
        model_kwargs: further arguments for loading the model, as text.
    """
    from kvpress.cache.report import format_bytes
    from kvpress.calibrate.corpus import documents, pack
    from kvpress.calibrate.run import calibrate
    from kvpress.hf.generation.pipeline import load_model
    from kvpress.hf.model_kwargs import configured, parse_model_kwargs
    from kvpress.hf.models import device_named

    settings.check_out(out)
    check_outputs(settings.outputs(out), [model, *data], force)
    if tokens < settings.shortest:
        raise ValueError(
            f"{settings.method} needs sequences of {settings.shortest} tokens or more with these settings, got {tokens}: pass "
            f"--tokens {settings.shortest}"
        )
    place = device_named(device)
    loaded, tokenizer = load_model(model, **configured(model, parse_model_kwargs(model_kwargs)))
    ids = pack(tokenizer, (text for source in data for text in documents(source)), tokens, sequences)
    with Progress(console=Console(stderr=True)) as progress:
        rows: dict[str, TaskID] = {}

        def report(phase: str, done: int, total: int) -> None:
            if phase not in rows:
                rows[phase] = progress.add_task(phase)
            progress.update(rows[phase], completed=done, total=total)

        calibrate(loaded.to(place), ids, settings, out, " ".join(data), report)
    typer.echo(f"wrote {out} ({format_bytes(out.stat().st_size)})")


def _expected(default: tuple[int, ...]) -> str:
    """Return the form of an option with several numbers; two of them are for keys and for values."""
    return "a number or two, keys,values" if len(default) == 2 else "integers with commas between them"


def _numbers(name: str, text: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Read integers with commas between them; one number where two are expected counts for keys and values."""
    try:
        numbers = tuple(int(number) for number in text.split(","))
    except ValueError:
        numbers = ()
    is_pair = len(default) == 2
    if not numbers or (is_pair and len(numbers) > 2):
        raise ValueError(f"{name} must be {_expected(default)}; got {text!r}")
    return (numbers[0], numbers[-1]) if is_pair else numbers


calibrate_app = typer.Typer(
    cls=MethodGroup,
    no_args_is_help=True,
    context_settings={"ignore_unknown_options": True},
    subcommand_metavar="METHOD [OPTIONS]",
    help="Fit the file of a calibrated method to a model; a stopped run resumes. `kvpress calibrate METHOD -h` shows the "
    "options of a method.",
)
