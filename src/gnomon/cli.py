"""The command line: parses, calls, prints; nothing else. `command` says what its exit codes mean."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg

import gnomon
from gnomon import continuity, evaluation, report
from gnomon.command import exit_code
from gnomon.errors import MissingExtra, UserError, check_name, printable, suggest
from gnomon.files import check_writable, read_json, write_json
from gnomon.progress import tell

if TYPE_CHECKING:
    from gnomon.train import Recipe

# What imports torch (or takes a while) is imported inside the commands, so that help is instant; the rooms above are lazy.

ABOUT = """Transformers with a geometry you choose and can see: train them with hidden states on a sphere and weights on manifolds,
and inspect any checkpoint for what runs through its depth.

`gnomon COMMAND --help` tells each command's flags, `gnomon --version` the version."""


def train(
    preset: Annotated[Positional[str | None], arg(metavar="PRESET")] = None,
    /,
    config: Path | None = None,
    out: Path | None = None,
    steps: int | None = None,
    seed: int | None = None,
    lr: float | None = None,
    residual: str | None = None,
    p: float | None = None,
    assignment: str | None = None,
    data: str | None = None,
    init: str | None = None,
    device: str | None = None,
    sink: Annotated[tuple[str, ...], arg(metavar="NAME")] = (),
    dry_run: Annotated[bool, FlagCreatePairsOff] = False,
    processes: int | None = None,
    set: Annotated[tuple[str, ...], arg(metavar="KEY=VALUE")] = (),
) -> None:
    """Train a model, or continue a run that was stopped. On several computers: torchrun … -m gnomon train …

    Args:
        preset: tiny (if nothing is said), gpt2-small, gpt2-medium, gpt2-large or llama-34m.
        config: a recipe.json to start from instead of a preset.
        out: run folder; runs/PRESET-RESIDUAL-seedN by default.
        steps: optimizer steps; more than those of a finished run extend it.
        seed: of the init and the order of batches.
        lr: peak learning rate.
        residual: how sublayers join the stream; see `gnomon residuals`. Without this and --assignment: what we
            recommend.
        p: retraction of the sphere residual; 1 projection, 2 Cayley, inf exponential map.
        assignment: adamw, muon, or what holds attention and MLP matrices: none, stiefel, dgram, hetero, hetero-inv,
            sphere, spectral-ball, spectral-sphere, auto, qk-ball.
        data: "jargon", a token file, a folder of shards, a .txt file, or a mixture: "0.7*FOLDER + 0.3*FOLDER".
        init: start from a checkpoint: a Hugging Face GPT-2 or Llama, a run, an export. It sets the model's shape and
            tokenizer.
        device: auto, cpu, cuda or mps.
        sink: send metrics to these as well: tensorboard, wandb, trackio.
        dry_run: tell what the run will take, memory, traffic and time, and stop.
        processes: start so many on this computer, one a device; with --dry-run, tell what each of so many will take.
        set: any other setting of the recipe, e.g. --set model.width=256 optim.clip=null.
    """
    from gnomon.train.asking import recipe_for, usual_folder

    flags = {
        "steps": steps,
        "seed": seed,
        "optim.lr": lr,
        "model.residual": residual,
        "model.residual_options.p": p,
        "data.train": data,
        "compute.device": device,
    }
    changes = _given(**flags) | _pairs(set)
    recipe = recipe_for(preset, config, assignment=assignment, init=init, changes=changes)
    folder = out or usual_folder(recipe)
    if dry_run:
        if is_main():
            _dry_run(recipe, folder, sink, processes or int(os.environ.get("WORLD_SIZE", 1)))
        return
    if processes is not None and processes != 1:
        raise SystemExit(_several(recipe, folder, sink, processes))

    from gnomon.train import train as run

    record = run(recipe, folder, sinks=sink, extend=True, tell=print)
    if record["stopped"]:
        if is_main():
            print(f"stopped after step {record['step']}, saved; the same command continues")
        raise KeyboardInterrupt
    if is_main():
        try:
            print(f"wrote {evaluation.report_of(folder)}")
        except MissingExtra as error:
            print(f"wrote {folder}, without a report: {error}")


def _several(recipe: Recipe, folder: Path, sinks: tuple[str, ...], processes: int) -> int:
    """Train in so many processes on this computer; returns the exit code."""
    from gnomon.train import replace, to_dict
    from gnomon.train.launch import launch
    from gnomon.train.run_setup import check

    if "WORLD_SIZE" in os.environ:
        raise UserError("--processes starts processes, and so does torchrun, which started this one: give one of them")
    if processes < 1:
        raise UserError(f"--processes counts from 1, got {processes}")
    # Before seconds go into starting them. Of a GPU this process would hold a piece to the end.
    check(replace(recipe, {"compute.device": "cpu"}), folder, sinks)
    with tempfile.TemporaryDirectory() as temporary:
        write_json(Path(temporary) / "recipe.json", to_dict(recipe))
        return launch(Path(temporary) / "recipe.json", folder, processes, sinks)


def _dry_run(recipe: Recipe, folder: Path, sinks: tuple[str, ...], processes: int) -> None:
    """What the run will take, and what would stand in its way."""
    from gnomon.train.estimate import estimate, table
    from gnomon.train.run_setup import check

    report.show(table(estimate(recipe, processes, here=processes == 1)))
    check(recipe, folder, sinks)


def is_main() -> bool:
    """Whether this process is the one that prints; torchrun numbers them."""
    return os.environ.get("RANK", "0") == "0"


def compare(runs: Positional[tuple[Path, ...]], /, out: Path = Path("runs/report.html")) -> None:
    """Put runs side by side: a table here and curves in one HTML file.

    Args:
        runs: run folders.
        out: where to write the report.
    """
    check_writable(out)
    rows = [report.summary(run) for run in report.read_runs(runs)]
    report.show(rows, **report.summary_table(rows))
    print(f"wrote {report.run_report(list(runs), out, figures=False)}")


def report_run(
    run: Positional[Path], /, out: Path | None = None, watch: Annotated[bool, FlagCreatePairsOff] = False
) -> None:
    """Write the report of a run as it stands; with --watch again and again until the run ends.

    Args:
        run: run folder.
        out: where to write the report; report.html in the run folder by default.
        watch: write it anew while the run goes on; the open page loads itself again.
    """
    if out is not None:
        check_writable(out)
    path = evaluation.watch(run, out, tell=print) if watch else evaluation.report_of(run, out)
    print(f"wrote {path}")


def generate(
    run: Positional[Path],
    /,
    prompt: str = "\n",
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    device: str = "auto",
) -> None:
    """Continue a prompt with a trained model.

    Args:
        run: run folder or checkpoint folder.
        prompt: text to continue.
        tokens: how many tokens to add.
        temperature: 0 takes the likeliest token every time.
        top_k: draw from this many likeliest tokens; 0 for all.
        seed: of the draws.
        device: auto, cpu, cuda or mps.
    """
    model, tokenizer, _ = evaluation.load(run, device=device)
    for piece in evaluation.generate(model, tokenizer, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed):
        # An untrained model writes escape codes too; into a file they may go.
        print(printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)
    print()


def export(run: Positional[Path], out: Positional[Path], /, verify: bool = False) -> None:
    """Write a trained model as a Hugging Face folder: weights, tokenizer, model card.

    Ordinary blocks become GPT-2 or Llama of transformers; others open after `gnomon.register()`, or with the code in the folder.

    Args:
        run: run folder or checkpoint folder.
        out: folder to make; it appears whole or not at all.
        verify: reload it in a fresh process and compare logits and token ids.
    """
    from gnomon.export import export as run_export

    made = run_export(run, out, verify=verify)
    if made.family:
        print(f"wrote {out}: {made.model}, opens in transformers, vLLM and llama.cpp without custom code")
    else:
        print(f"wrote {out}: {made.model}, opens after `gnomon.register()` or with trust_remote_code=True")
        print(f"(no class of transformers has these blocks: {'; '.join(made.obstacles)})")
    if verify:
        print(made.verdict)


def compress(
    model: Positional[str],
    out: Positional[Path],
    /,
    calibrate: Path,
    keep: float = 0.8,
    method: str = "private",
    by: str | None = None,
    group: int | None = None,
    groups: str | None = None,
    sides: str | None = None,
    tokens: int | None = None,
    seed: int = 0,
    heal: int = 0,
    verify: Annotated[bool, FlagCreatePairsOff] = False,
) -> None:
    """Make a checkpoint smaller; the result is a folder that transformers opens. The same command continues after an
    interruption. Needs the extra "hf".

    Args:
        model: what `inspect` reads and transformers can run; it is only read.
        out: folder to make; it appears whole or not at all.
        calibrate: a text (.txt, .txt.gz, or token file) to which the smaller model is fitted.
        keep: share of the block weights that stay.
        method: private (each matrix a product of two), pivoted (the same, stored in less), shared (neighbours share bases), modules
            (fewer channels in MLP and heads), mlp (in the MLP alone), depth (blocks are left out), merge (two neighbours become one) or
            auto (tries mixtures of these, and takes what loses least on a part of the text that it was not fitted to).
        by: of depth, which blocks go: loss (the default: the one that costs least, again and again), change (those that turn the states
            least), continuity (those most like the one before) or random. Of merge, which pairs become one: change (the default),
            continuity or random.
        group: of shared, how many neighbouring blocks share; 2.
        groups: of shared, how they are found: equal (the default), continuity, tail (the energy that sharing loses) or random.
        sides: of shared, on which side: role (the default; query, key, gate, up: input; output, down: output; value: none), input or
            output.
        tokens: of the text, at most; 16,384, and 4,096 for depth and merge.
        seed: of what is chosen at random.
        heal: then train the result for so many steps on the same text; told separately.
        verify: open the folder in a fresh process, without gnomon, and compare logits.
    """
    from gnomon.compress import METHODS

    check_name("method", method, [*METHODS, "depth", "merge", "auto"])
    if method != "shared":
        _refuse("goes with --method shared", group=group, groups=groups, sides=sides)
    if method not in ("depth", "merge"):
        _refuse("goes with --method depth or merge", by=by)
    else:
        if verify:
            raise UserError("--verify is for matrices that were replaced; fewer blocks are checked always")
        merge = method == "merge"
        _shorten(
            model, out, calibrate, keep, by or ("change" if merge else "loss"), merge, seed, **_given(tokens=tokens)
        )
        return _heal(out, model, calibrate, heal, seed)

    from gnomon.compress import auto
    from gnomon.compress import compress as run_compress
    from gnomon.compress.work_estimate import UNITS

    options: dict[str, Any] = dict(
        seed=seed,
        verify=verify,
        show=lambda work: report.show(work.table(), UNITS),
        progress=True,
        **_given(tokens=tokens),
    )
    if method == "auto":
        made, tried = auto(model, out, calibrate, keep, **options)
        report.show(
            [{"mixture": str(one), "loss": one.loss} for one in tried],
            title="tried, loss in nats/token on rows not fitted to",
        )
    else:
        sharing = _given(group=group, groups=groups, sides=sides)
        made = run_compress(model, out, calibrate, keep, method=method, **sharing, **options)
    _before_and_after(made)
    how = "opens in transformers" if made.plain else "opens in transformers with trust_remote_code=True"
    print(f"wrote {made.folder}: {how}")
    if made.difference is not None:
        print(f"Verified: logits of a fresh process differ by {made.difference:.1e} of the largest.")
    _heal(out, model, calibrate, heal, seed)


def _heal(folder: Path, source: str, text: Path, steps: int, seed: int) -> None:
    if steps == 0:
        return
    from gnomon.compress import heal

    healed = heal(folder, text, steps, seed=seed, source=source, progress=True)
    losses = f"{healed.loss_before:.4f} -> {healed.loss:.4f} nats/token"
    print(f"healed by {healed.steps:,} steps: {losses} on {healed.rows} rows of the text that were not trained on")


def _shorten(model: str, out: Path, calibrate: Path, keep: float, by: str, merge: bool, seed: int, **more: Any) -> None:
    from gnomon.compress import shorten

    made = shorten(model, out, calibrate, keep, by=by, merge=merge, seed=seed, progress=True, **more)
    _before_and_after(made)
    if made.removed:
        what = "merged with the block before" if merge else "left out, in this order"
        print(f"{what}: {', '.join(map(str, made.removed))}; {made.blocks} blocks stay")
    print(f"wrote {made.folder}")


def _before_and_after(made: Any) -> None:
    report.show(
        [
            {"": "before", "weights": made.parameters_before, "loss": made.loss_before},
            {"": "after", "weights": made.parameters, "loss": made.loss},
        ],
        {"": "", "weights": "weights of the blocks", "loss": "loss on the calibration text (nats/token)"},
    )


def eval(
    run: Positional[Path],
    /,
    data: str | None = None,
    wikitext: bool = False,
    tokens: int | None = None,
    tasks: str | None = None,
    task_path: Path | None = None,
    fewshot: int | None = None,
    limit: int | None = None,
    json: Path | None = None,
    device: str = "auto",
) -> None:
    """Perplexity of a trained model, or its scores on tasks of lm_eval.

    Args:
        run: run folder or checkpoint folder.
        data: token file, folder of shards or .txt file; None for the run's own validation slice. Or wikitext-2 or
            wikitext-103 (from the hub).
        wikitext: data is a file in WikiText's form; gives the perplexity a word, as lm_eval's task wikitext does.
        tokens: how many tokens at most; 1,048,576 if not given, of WikiText all.
        tasks: names after commas, e.g. hellaswag,piqa; or zero-shot for the usual ones. Needs the extra "eval".
        task_path: folder of further task files (.yaml); with local data they run offline.
        fewshot: worked examples in each prompt; None for what each task says.
        limit: documents a task at most.
        json: write the rows here.
        device: auto, cpu, cuda or mps.
    """
    from gnomon.data.wikitext import HUB_SETS

    if json is not None:
        check_writable(json)
    if tasks is not None:
        if data is not None or wikitext or tokens is not None:
            raise UserError("--tasks and --data are two evaluations: give one at a time (--limit shortens tasks)")
        rows = evaluation.evaluate_tasks(
            run, tasks.split(","), task_path=task_path, fewshot=fewshot, limit=limit, device=device
        )
    elif task_path is not None or fewshot is not None or limit is not None:
        raise UserError("--task-path, --fewshot and --limit go with --tasks; name some, e.g. --tasks hellaswag,piqa")
    elif wikitext and data is None:
        raise UserError("--wikitext says what --data is: give a file, or --data wikitext-2 for the one on the hub")
    elif data is not None and (wikitext or data in HUB_SETS):
        rows = evaluation.wikitext(run, data, tokens=tokens, device=device)
    else:
        rows = [evaluation.perplexity(run, data, device=device, **_given(tokens=tokens))]
    report.show(rows, {key: evaluation.UNITS.get(key, key) for row in rows for key in row})
    if json is not None:
        write_json(json, rows)
        print(f"wrote {json}")


def data(
    source: Positional[str],
    out: Positional[Path],
    /,
    tokenizer: str = "gpt2",
    field: str = "text",
    val_fraction: float = 0.01,
    shard_tokens: int = 100_000_000,
    limit: int | None = None,
    workers: int = 1,
    skip_bad: Annotated[bool, FlagCreatePairsOff] = False,
) -> None:
    """Turn text into token files; the same command continues after an interruption.

    Args:
        source: a .txt, .jsonl or .parquet file (also .gz), a folder or quoted glob of them, or openwebtext, fineweb-edu,
            wikitext-103.
        out: folder for val_000000.bin, train_000001.bin …
        tokenizer: gpt2, byte, or a tokenizer.json.
        field: name of the text in .jsonl and .parquet files.
        val_fraction: share of the documents held out for validation.
        shard_tokens: tokens a file.
        limit: stop after this many tokens.
        workers: processes that tokenise; the files do not depend on it.
        skip_bad: leave out rows without a text and count them; else the first ends the job.
    """
    from gnomon.data import prepare

    prepare(
        source,
        out,
        tokenizer=tokenizer,
        field=field,
        val_fraction=val_fraction,
        shard_tokens=shard_tokens,
        limit=limit,
        workers=workers,
        skip_bad=skip_bad,
    )


def inspect(
    checkpoint: Positional[str],
    /,
    json: Path | None = None,
    html: Path | None = None,
    csv: Path | None = None,
    compare: str | None = None,
    base: str | None = None,
    config: Path | None = None,
    top: int = 8,
    full: bool = False,
    fold_norms: bool = False,
    per_head: bool = False,
    lag: int = 1,
    text: Path | None = None,
    tokens: int | None = None,
    removal: Annotated[bool, FlagCreatePairsOff] = False,
) -> None:
    """Tell how the leading singular directions of a checkpoint run through its depth. Large ones on several processes:
    torchrun --nproc-per-node N -m gnomon inspect …

    Args:
        checkpoint: a folder or file (safetensors, .bin, .pt, GGUF), a run folder, a LoRA folder, or a hub id.
        json: write every number here.
        html: write the report here, one offline file.
        csv: write the rows here.
        compare: a second checkpoint, shown side by side.
        base: for a LoRA folder, the model its update is added to.
        config: the model's config.json (or its folder), where the checkpoint has none beside it.
        top: leading singular vectors of each matrix.
        full: all of them, in fp64: adds weighted, Gram and Frobenius measures and the price of sharing a basis.
        fold_norms: multiply the gains of neighbouring norms into each matrix first.
        per_head: compare attention heads as well.
        lag: compare layers this many places apart.
        text: run the model on this text (.txt, .txt.gz, or token file) as well, one block in memory at a time, and tell
            what its hidden states and attention do. Needs the extra "hf".
        tokens: of the text, at most; 4,096.
        removal: with --text, also the loss without each block.
    """
    for path in (json, html, csv):
        if path is not None:
            check_writable(path)
    known = read_json(config / "config.json" if config.is_dir() else config) if config else None
    if text is None:
        _refuse("is for a text: give one with --text", tokens=tokens, removal=removal or None)
    reading, refusal = None, None
    if text is not None and is_main():
        from gnomon.running import WithWeights

        reading, refusal = _on_text(checkpoint, text, removal, known, **_given(tokens=tokens))
    found = continuity.inspect(
        checkpoint, top, full=full, fold_norms=fold_norms, per_head=per_head, lag=lag, compare=compare, base=base,
        config=known, progress=is_main(), together=True,
    )  # fmt: skip
    if not is_main():
        return
    shown: Any = found
    if reading is not None:
        try:
            shown = WithWeights(found, reading.run(progress=True))
        except UserError as error:
            refusal = error
    shown.show()
    for path, write in ((json, shown.to_json), (html, shown.to_html), (csv, shown.to_csv)):
        if path is not None:
            print(f"wrote {write(path)}")
    if refusal is not None:
        raise refusal  # the report of the weights is written


def _on_text(
    checkpoint: str, text: Path, removal: bool, config: dict[str, Any] | None, **more: Any
) -> tuple[Any, UserError | None]:
    """What is ready to read the text, told with what it will take; or why it cannot be read, to be told after the weights."""
    from gnomon.running import prepare

    try:
        ready = prepare(checkpoint, text, removal=removal, config=config, **more)
    except UserError as error:
        tell(f"the text will not be read: {error}")
        return None, error
    tell(f"{ready.rows.count:,} tokens of {text}: {ready.expected}")
    return ready, None


def study(
    name: Positional[str],
    /,
    scale: str = "tiny",
    seeds: int | None = None,
    jobs: int = 1,
    processes: int = 1,
    data: str | None = None,
    variants: tuple[str, ...] = (),
    out: Path | None = None,
    outcomes: Path | None = None,
    dry_run: bool = False,
    set: Annotated[tuple[str, ...], arg(metavar="KEY=VALUE")] = (),
) -> None:
    """Re-run a paper as a grid of runs, with tuned baselines, several seeds and a verdict; the same command continues.

    Args:
        name: residuals, manifolds, continuity, drift, instability, recipe, auto, map or warnings; or compression, which trains
            nothing: --data is the calibration text, --variants are methods, --set says model=, texts= and more.
        scale: smoke (whether it works, two minutes), tiny (eight minutes to an hour on two cores), small (hours on a laptop
            or one GPU) or paper.
        seeds: compared seeds; the tuning seed comes on top.
        jobs: runs at a time; each gets an equal share of the cores.
        processes: of each language model's run, one a device, started by torchrun; also what --dry-run counts with.
        data: training tokens of the language models; embedded text by default at scale tiny.
        variants: only these, and the baselines they need.
        out: study folder; runs/study-NAME-SCALE by default.
        outcomes: a file of what runs came to, read first and added to: a study goes on from it on another machine.
        dry_run: print what is left, runs, parameters, tokens, operations, memory and expected time, and stop.
        set: any other setting of the language models' recipes, e.g. --set steps=20 model.width=64.
    """
    from gnomon import studies
    from gnomon.studies import study_estimate, study_page

    if name == studies.COMPRESSION:
        if (scale, jobs, processes) != ("tiny", 1, 1):
            raise UserError(
                "--scale, --jobs and --processes are for studies that train; compression measures one model in one process"
            )
        return _study_compression(data, seeds, variants, out, outcomes, dry_run, _pairs(set))
    found = studies.load(name, scale, seeds=seeds, data=data, variants=variants, changes=_pairs(set))
    folder = out or Path("runs") / f"study-{name}-{scale}"
    rows = studies.dry_run(found, processes, folder, outcomes)
    if dry_run:
        report.show(rows, **study_estimate.SHOWN)
        return
    print(study_estimate.line(rows[-1]), flush=True)
    results, path = studies.run(found, folder, jobs, processes, outcomes)
    report.show(study_page.table(results), **study_page.SHOWN)
    if claims := results.claims():
        report.show(claims)
    print(f"wrote {path}, results.csv and results.md")


def _study_compression(
    data: str | None,
    samples: int | None,
    methods: tuple[str, ...],
    out: Path | None,
    outcomes: Path | None,
    dry_run: bool,
    changes: dict[str, Any],
) -> None:
    from gnomon.studies import compression_cells, compression_study, compression_verdict

    setup = compression_cells.setup(data, samples, methods, changes)
    file = outcomes or (out or Path("runs") / "study-compression") / "outcomes.jsonl"
    if dry_run:
        report.show(compression_study.left(setup, file))
        return
    lines = compression_study.run(setup, file)
    for family in compression_verdict.families(lines):
        for title, rows in compression_verdict.tables(lines, family).items():
            report.show(rows, title=f"{family}: {title}")
    report.show(compression_verdict.claims(lines))
    print(f"wrote {file}")


def advise(
    layers: int,
    width: int,
    tokens: float,
    batch_tokens: int | None = None,
    tuning: int = 0,
    modern: Annotated[bool, FlagCreatePairsOff] = False,
    json: Path | None = None,
) -> None:
    """Tell what to take for a planned run, by what was measured, and how far that reaches.

    Args:
        layers: blocks.
        width: channels of the stream.
        tokens: of the whole run, e.g. 10e9.
        batch_tokens: tokens a step; a twenty-thousandth of all, from 512 to 524,288, if not given.
        tuning: whole runs' worth of tuning you can afford.
        modern: for a model with ReLU squared, zero-init output projections, QK-norm and an untied head.
        json: write all of it here.
    """
    from gnomon.train import advice_tables, evidence, recommend

    if json is not None:
        check_writable(json)
    planned = recommend.plan(layers, width, tokens, batch_tokens)
    found = recommend.advise(planned, evidence.load(), tuning=tuning, block="modern" if modern else "plain")
    report.show(advice_tables.found(found))
    report.show(advice_tables.evidence(found.chosen))
    report.show(advice_tables.distance(found))
    for note in found.notes:
        print(f"- {note}")
    print(f"\n{advice_tables.command(found)}")
    if trials := recommend.to_try(found.settings, tuning):
        report.show(advice_tables.trials(trials))
    if json is not None:
        write_json(json, found.to_dict())
        print(f"wrote {json}")


def residuals() -> None:
    """List the ways a sublayer can join the residual stream."""
    from gnomon import residual

    report.show([{"name": name, "what it does": line} for name, line in residual.names().items()])


def doctor() -> None:
    """Tell what this machine offers and which fallbacks will be taken, with the reason."""
    from gnomon import doctor

    report.show(doctor.findings())


def _refuse(why: str, **flags: Any) -> None:
    """A flag that was given where nothing reads it is a mistake."""
    for name in _given(**flags):
        raise UserError(f"--{name} {why}")


def _given(**flags: Any) -> dict[str, Any]:
    """The flags that were given; the others are as the function called has them."""
    return {name: value for name, value in flags.items() if value is not None}


def _pairs(pairs: tuple[str, ...]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise UserError(f"--set takes KEY=VALUE, got {pair!r}")
    return dict(pair.split("=", 1) for pair in pairs)


COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "report": report_run,
    "compare": compare,
    "generate": generate,
    "eval": eval,
    "export": export,
    "compress": compress,
    "data": data,
    "inspect": inspect,
    "study": study,
    "advise": advise,
    "residuals": residuals,
    "doctor": doctor,
}


def overview() -> str:
    """What `gnomon --help` prints: every command with the first paragraph of its docstring."""
    width = min(shutil.get_terminal_size().columns, 100)
    lines = ["usage: gnomon COMMAND [-h] …", "", *(textwrap.fill(text, width) + "\n" for text in ABOUT.split("\n\n"))]
    for name, command in COMMANDS.items():
        told = " ".join((command.__doc__ or "").split("\n\n")[0].split())
        lines.append(textwrap.fill(told, width, initial_indent=f"  {name:<12}", subsequent_indent=" " * 14))
    return "\n".join(lines)


def _call(name: str = "", *arguments: str) -> None:
    """The first word names the command, whose own parser reads the others."""
    if not name:
        raise UserError(f"which command?\n\n{overview()}")
    if name in ("-h", "--help"):
        print(overview())
    elif name == "--version":
        print(f"gnomon {gnomon.__version__}")
    elif name in COMMANDS:
        tyro.cli(COMMANDS[name], prog=f"gnomon {name}", args=arguments)
    else:
        raise UserError(f"no command {printable(name)!r}. {suggest(name, COMMANDS)}")


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: _call(*arguments))


if __name__ == "__main__":
    sys.exit(main())
