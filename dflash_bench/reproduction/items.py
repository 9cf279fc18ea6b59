"""Items: what a table or figure of the paper shows, and how it is measured here, a TOML file each.

A published figure belongs to an arm of its item by its configuration and method, and to a run by its target.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_bench.analysis.peers.paper import PaperFigure, load_figures
from dflash_bench.core import files
from dflash_bench.core.errors import UserError, first_line, unknown
from dflash_bench.core.methods import name_of, parse

FOLDER = Path(__file__).with_name("items")
AVERAGE = "average"
"""The data set of published means over a table's suites."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Arm(_Part):
    """A row of a published table: its configuration there, and its method here."""

    config: str
    method: str
    published: str | None = None
    """The method's name in the published figures, if it differs."""
    drafts: Mapping[str, str] = {}
    """Drafts that are not the model's own, as `--draft` takes them."""
    draft_ms: float | None = None
    """The published time of a draft, in an item of drafting times."""
    train: Mapping[str, Any] = {}
    """Options of `train` for its draft, by their Python names; empty if its draft is published."""
    models: list[str] = []
    """The targets that it was published for; empty for all of the item."""

    @property
    def name(self) -> str:
        """The method's name, as figures have it."""
        return name_of(parse(self.method).label)

    def holds(self, figure: PaperFigure) -> bool:
        is_for = not self.models or figure.target_model in self.models
        return is_for and (figure.config, figure.method) == (self.config, self.published or self.name)


class Claim(_Part):
    """A sentence of the paper as an order of figures: by method, or along the values of a setting."""

    says: str
    metric: str
    above: str
    """The method whose figure is the greater one."""
    below: str | None = None
    """The method whose figure is the lesser one."""
    along: Literal["temperature", "concurrency", "context"] | None = None
    """The setting along whose values the figure falls."""


class Item(_Part):
    """A table or figure of the paper."""

    name: str
    title: str
    source: str
    figures_in: str | None = None
    """The table whose figures it draws, if it has none of its own."""
    engine: Literal["own", "sglang", "vllm"]
    gpu: str
    open: list[str] = []
    """Conditions that the publication does not state."""
    models: Mapping[str, str]
    """The preset of each published target."""
    run: Mapping[str, Any] = {}
    """Options of a run, by their Python names."""
    profile: Mapping[str, Any] = {}
    """Methods, layers of drafts and contexts of a profile, for an item of drafting times; it has no run."""
    arms: list[Arm]
    claims: list[Claim] = []

    def arms_of(self, target: str) -> list[Arm]:
        return [arm for arm in self.arms if not arm.models or target in arm.models]

    def arm_of(self, figure: PaperFigure) -> Arm | None:
        return next((arm for arm in self.arms if arm.holds(figure)), None)

    @property
    def figures(self) -> list[PaperFigure]:
        """The published figures of its arms at its temperatures."""
        source, temperatures = self.figures_in or self.source, self.run.get("temperature", ())
        return [
            one
            for one in load_figures()
            if one.source == source
            and one.target_model in self.models
            and one.temperature in temperatures
            and self.arm_of(one) is not None
        ]


@cache
def items() -> dict[str, Item]:
    """Return every item by name, in the order of the paper.

    Raises UserError for a file that is not an item's.
    """
    found = [_read(path) for path in sorted(FOLDER.glob("*.toml"), key=_place)]
    return {item.name: item for item in found}


def item(name: str) -> Item:
    """Raises UserError for an unknown name."""
    known = items()
    if name not in known:
        raise unknown("item", name, list(known))
    return known[name]


def _place(path: Path) -> tuple[str, int]:
    letters = path.stem.rstrip("0123456789")
    return letters, int(path.stem[len(letters) :] or 0)


def _read(path: Path) -> Item:
    try:
        return Item(**{"name": path.stem} | files.toml_of(path))
    except ValidationError as error:
        raise UserError(f"{path.name}: {first_line(error)}") from error
