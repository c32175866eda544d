"""The cells of `gnomon study compression`: what is asked of one model, and in which order it is measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from gnomon.errors import UserError, check_name
from gnomon.files import check_readable

PARTS = ("roles", "pairs", "blocks", "whitening")
ROLE_KEEP = 0.5
"""Of one role's weights, where it alone is made smaller: at 0.8 of so little, differences drown."""

HEALED = " + heal "
"""Between a method and the steps of training, in the name of a cell."""
_WHOLE = ("calibration", "tokens", "length", "items", "heal")
_SPLITS = ("train", "valid", "validation", "test")


class Cell(NamedTuple):
    """What is measured at once: a method or part, the share that stays, and the number of the calibration sample."""

    method: str
    keep: float
    sample: int


@dataclass(frozen=True)
class Setup:
    """A study of one model.

    Attributes:
        model: what `gnomon inspect` reads.
        data: the calibration text, or a token file.
        texts: evaluation texts or token files.
        name: of the model in the results.
        keep: shares of the block weights that stay.
        samples: how many calibration samples.
        methods: names of methods and parts; none for all.
        calibration, tokens, length: tokens of a calibration sample, of each evaluation text, and of a row.
        sequential: whether each block is fitted to what the smaller ones before it give; else to what the whole model gives, which is
            measured once for all methods and shares.
        lambada, items: a file of passages whose last word is asked for, and how many are read; "" for none.
        heal: steps of training after which each smaller model is measured once more; 0 for none.
    """

    model: str
    data: str
    texts: tuple[str, ...]
    name: str
    keep: tuple[float, ...] = (0.8, 0.6, 0.9, 0.7)
    samples: int = 3
    methods: tuple[str, ...] = ()
    calibration: int = 16384
    tokens: int = 8192
    length: int = 512
    sequential: bool = True
    lambada: str = ""
    items: int = 200
    heal: int = 0

    @property
    def named_texts(self) -> dict[str, str]:
        """Name in the results -> file: its name without endings; with that of its folder where that is "test" or the like."""
        stems = {text: Path(text).name.split(".")[0] for text in self.texts}
        return {f"{Path(text).parent.name}-{stem}" if stem in _SPLITS else stem: text for text, stem in stems.items()}

    @property
    def same(self) -> dict[str, Any]:
        """What two lines of a file must share to be of one study."""
        kept = ("calibration", "tokens", "length", "sequential")
        return {"model": self.name} | {key: getattr(self, key) for key in kept}


def setup(data: str | None, samples: int | None, methods: Sequence[str], changes: Mapping[str, Any]) -> Setup:
    """From what the command line gives.

    Raises:
        UserError: no model, no text, an unknown setting or method.
    """
    from gnomon.studies.compression_methods import METHODS, ROUNDED

    known = ("model", "texts", "name", "keep", "calibration", "tokens", "length", "sequential", "lambada", "items", "heal")
    for key in changes:
        check_name("setting of this study", key, known)
    needed = {"--data": data, "--set model=": changes.get("model"), "--set texts=": changes.get("texts")}
    missing = [key for key, value in needed.items() if not value]
    if missing:
        raise UserError(
            f"study compression makes a trained model smaller; {', '.join(missing)} missing. E.g. gnomon study compression --data "
            "calibration.txt --set model=./some-model texts=other.txt,novels.txt"
        )
    for method in methods:
        check_name("method or part", method, [*METHODS, *ROUNDED, *PARTS])
    given: dict[str, Any] = {}
    try:
        given |= {key: int(changes[key]) for key in _WHOLE if key in changes}
        given |= {"keep": tuple(float(share) for share in str(changes["keep"]).split(","))} if "keep" in changes else {}
    except ValueError as error:
        names = ", ".join(f"{key}=" for key in _WHOLE)
        raise UserError(f"--set {names} are whole numbers, keep= shares such as 0.8,0.6 ({error})") from None
    if "sequential" in changes:
        given["sequential"] = check_name("value of sequential", str(changes["sequential"]).lower(), ("true", "false")) == "true"
    texts = tuple(str(changes["texts"]).split(","))
    if changes.get("lambada"):
        given["lambada"] = str(check_readable(str(changes["lambada"])))
    for text in texts:
        if Path(text).suffix:
            check_readable(text)
    if len(Setup("", "", texts, "").named_texts) < len(texts):
        raise UserError(f"--set texts={changes['texts']}: files of equal names cannot be told apart in the results; rename one")
    name = str(changes.get("name") or Path(str(changes["model"])).name)
    made = Setup(str(changes["model"]), str(data), texts, name, methods=tuple(methods), **given)
    return made if samples is None else replace(made, samples=samples)


def asked(setup: Setup, cell: Cell) -> tuple[str, ...]:
    """What is measured of a cell."""
    return (cell.method,) if cell.method in PARTS else ("losses", "lambada")[: 1 + bool(setup.lambada)]


def cells(setup: Setup) -> Iterator[Cell]:
    """All of them, the whole model first; one sample of all comes before the next."""
    from gnomon.studies.compression_methods import METHODS, ROUNDED

    wanted = setup.methods or (*METHODS, *ROUNDED, *PARTS)
    yield Cell("whole", 1.0, 0)
    for sample in range(setup.samples):
        for keep in setup.keep:
            yield from (Cell(method, keep, sample) for method in METHODS if method in wanted)
        # What is rounded is not trained: that would undo it.
        trained = [method for method in METHODS if setup.heal and method in wanted and "+" not in method]
        yield from (Cell(f"{method}{HEALED}{setup.heal}", keep, sample) for keep in setup.keep for method in trained)
        if not sample:
            yield from (Cell(method, 1.0, 0) for method in ROUNDED if method in wanted)
        yield from (Cell(part, ROLE_KEEP, sample) for part in PARTS if part in wanted)
