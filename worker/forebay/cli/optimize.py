"""`forebay optimize`: which precision and which compilation make this model fastest here, and what that does to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.options import AsJson, ConfigFile, SetValues, read_settings
from forebay.errors import ConfigError, ModelError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.cli.optimize_view import Comparison
    from forebay.inference.messages import Tried
    from forebay.inference.verdicts import Answer, Question
    from forebay.settings import ModelSettings, Settings

_RECIPES = ("magnitude", "2:4")

_NOISY = 1.5
"""Times by which two measurements of the same may differ."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(optimize)


def optimize(
    precision: Annotated[
        str, typer.Option("--precision", metavar="A,B", help="Precisions to try; all: every one that there is.")
    ] = "all",
    compile: Annotated[
        str, typer.Option("--compile", metavar="A,B", help="Compilations to try; all: none, inductor, aoti, cudagraph.")
    ] = "all",
    sparsity: Annotated[
        str,
        typer.Option("--sparsity", metavar="A,B", help="Pruning to try: magnitude, 2:4; none leaves it out."),
    ] = "magnitude,2:4",
    share: Annotated[
        float, typer.Option("--share", min=0.01, max=0.99, help="Share of weights that magnitude pruning zeroes.")
    ] = 0.5,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="A .safetensors file for the weights of the one --sparsity, if they pass.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--model", help="Which of several models.", show_default=False)] = None,
    json: AsJson = False,
    config: ConfigFile = None,
    values: SetValues = None,
) -> int:
    """Measure the model in each precision and compilation, and say which settings to take.

    Each candidate runs in a process of its own, as a replica would run it: a batch of batch.max_batch_size rows, one of
    one row, and how far its golden outputs are from uncompiled fp32. Adopted is the fastest within
    inference.max_deviation (0.02 where that is not set). Nothing is changed, but --output writes pruned weights.
    """
    import orjson

    from forebay.cli.optimize_view import show
    from forebay.inference.verdicts import CANDIDATES, COMPILERS

    settings = read_settings(config, values)
    recipes = _chosen("--sparsity", sparsity, _RECIPES) if sparsity != "none" else []
    if output is not None and (len(recipes) != 1 or output.suffix != ".safetensors"):
        raise UsageError("--output takes a .safetensors file and one --sparsity: magnitude or 2:4")
    chosen = (_chosen("--precision", precision, CANDIDATES), _chosen("--compile", compile, COMPILERS), recipes)
    search = [Path.cwd(), *([config.resolve().parent] if config is not None else [])]
    questions = _questions(settings, _model(settings, name), chosen, search)
    for one in questions:
        one.share = share
        one.output = str(output.resolve()) if output is not None and one.sparsity else ""
    found = _compare(questions, settings.inference.start_timeout_ms / 1000, quiet=json)
    if json:
        typer.echo(orjson.dumps(found.as_document(), option=orjson.OPT_INDENT_2).decode())
    else:
        show(found)
    return 0


def _chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    if text == "all":
        return list(known)
    named = [part.strip() for part in text.split(",")]
    for part in named:
        if part not in known:
            raise UsageError(f"{option}: there is no {part!r}; there are {', '.join(known)}")
    return [part for part in known if part in named]


def _model(settings: Settings, name: str | None) -> ModelSettings:
    served = {model.name: model for model in settings.served}
    if name is None and len(served) == 1:
        return next(iter(served.values()))
    if not served:
        raise ConfigError("no model is configured: set model.factory (package.module:Class), for example in --config")
    if name is None:
        raise UsageError(f"the settings have several models; choose one with --model: {', '.join(served)}")
    if name not in served:
        raise UsageError(f"the settings have no model {name!r}; choose one with --model: {', '.join(served)}")
    return served[name]


def _questions(
    settings: Settings,
    model: ModelSettings,
    chosen: tuple[Sequence[str], Sequence[str], Sequence[str]],
    search: Sequence[Path],
) -> list[Question]:
    """Return every candidate, uncompiled fp32 first: it is what the others are compared with."""
    import msgspec

    from forebay.inference.assembly import start_of
    from forebay.inference.cores import share
    from forebay.inference.staging import SlotSize
    from forebay.inference.verdicts import DEFAULT_MOST, Question

    base = start_of(model, settings.inference, settings.batch, search, SlotSize(0, 0))
    base.sharing, base.session = 1, ""
    base.cpu_threads = share(1 if settings.inference.executor == "inline" else settings.inference.replicas)
    precisions, compilers, recipes = chosen
    pairs = list(dict.fromkeys([("fp32", "none"), *[(one, how) for how in compilers for one in precisions]]))
    most = DEFAULT_MOST if settings.inference.max_deviation is None else settings.inference.max_deviation
    made = [Question(msgspec.structs.replace(base, precision=one, compile=how), most=most) for one, how in pairs]
    dense = msgspec.structs.replace(base, precision="fp32", compile="none")
    half = msgspec.structs.replace(base, precision="bf16", compile="none")
    for recipe in recipes:
        made.append(Question(half if recipe == "2:4" else dense, recipe, most=most))
    return made


def _compare(questions: Sequence[Question], timeout: float, *, quiet: bool) -> Comparison:
    """Ask one process after the other. Raises ModelError where the model cannot be tried at all."""
    from forebay.cli.optimize_view import Comparison
    from forebay.cli.progress import counting
    from forebay.inference.verdicts import judge

    answers: list[Answer] = []
    with counting("measured", len(questions), quiet=quiet) as advance:
        for question in questions:
            answers.append(_known(question, answers) or _ask(question, timeout))
            advance(len(answers))
            if answers[-1].error and (len(answers) == 1 or question.output):
                raise ModelError(answers[-1].error)
    tried = [_tried(one) for one in answers]
    most = questions[0].most
    notes = list(dict.fromkeys(note for one in answers for note in one.notes))
    if any(0 < one.full_seconds < tried[0].full_seconds for one in tried[1:]):
        notes += _once_more(tried[0], _ask(questions[0], timeout).tried)
    adopted = judge([one for one in tried if not one.sparsity], most)
    for one in tried:
        if one.sparsity and not one.verdict:
            one.verdict = "passes; --output writes it" if one.deviation <= most else f"deviates more than {most:g}"
    written = next((one.written for one in answers if one.written), "")
    device = next((one.device for one in answers if one.device), "unknown")
    return Comparison(questions[0].start.model, device, most, tried, adopted, notes, written)


def _known(question: Question, answers: Sequence[Answer]) -> Answer | None:
    """Return the answer where it is known: what the machine lacks for a precision or a compilation it lacks for all."""
    from forebay.cli.optimize_view import NOT_HERE
    from forebay.inference.messages import Tried
    from forebay.inference.verdicts import Answer

    precision, how = question.start.precision, question.start.compile
    for one in answers:
        tried = one.tried
        is_alike = (tried.precision, tried.compile) in ((precision, "none"), ("fp32", how))
        if is_alike and tried.verdict.startswith(NOT_HERE):
            return Answer(Tried(precision, how, sparsity=question.sparsity, verdict=tried.verdict), one.device)
    return None


def _once_more(baseline: Tried, again: Tried) -> list[str]:
    """Take the shorter times of two measurements of the baseline; return what is to be said where they differ much."""
    first, last = baseline.full_seconds, again.full_seconds
    if not last:
        return []
    baseline.full_seconds = min(first, last)
    baseline.one_seconds = min(baseline.one_seconds, again.one_seconds)
    if max(first, last) < _NOISY * min(first, last):
        return []
    return [
        f"noisy: the model as it is took {first * 1000:.3g} ms at first and {last * 1000:.3g} ms in the end; measure "
        "again on a quiet machine before you adopt anything"
    ]


def _tried(found: Answer) -> Tried:
    if found.error:
        found.tried.verdict = f"fails: {found.error[:200]}"
    return found.tried


def _ask(question: Question, timeout: float) -> Answer:
    """Run one candidate in a process of its own."""
    import subprocess
    import sys

    import msgspec

    from forebay.inference.messages import Tried
    from forebay.inference.verdicts import Answer

    start = question.start
    nothing = Tried(start.precision, start.compile, sparsity=question.sparsity)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "forebay.cli.optimize_probe"],
            input=msgspec.msgpack.encode(question),
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(nothing, error=f"not measured after {timeout:g} s; raise inference.start_timeout_ms")
    try:
        return msgspec.msgpack.decode(done.stdout, type=Answer)
    except msgspec.DecodeError:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        code = done.returncode
        ended = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        return Answer(nothing, error=f"its process {ended}{f': {lines[-1]}' if lines else ''}")
