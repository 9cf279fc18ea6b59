"""Answers that a JSON Schema allows: servers are asked for them, and each answer is scored by the schema."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_bench.core.measurement import Instrument, Measurement
from dflash_bench.core.option import Condition, under
from dflash_bench.runner import rules

if TYPE_CHECKING:
    from dflash_bench.servers.backend import ServerBackend
    from dflash_bench.tasks.suites import Loaded


class SchemaRequest(Instrument):
    def __init__(self, path: Path) -> None:
        """Raises UserError for a file without a schema."""
        from dflash_bench.tasks.scorers import schema

        self.schema = schema.read(path)

    def identity(self) -> str:
        from dflash_bench.tasks.scorers import schema

        return schema.fingerprint(self.schema)

    def scored(self, suites: Sequence[Loaded]) -> list[Loaded]:
        from dflash_bench.tasks.scorers import schema
        from dflash_bench.tasks.suites import with_scorer

        return [with_scorer(one, schema.NAME, {schema.NAME: self.schema}) for one in suites]

    def connected(self, backend: ServerBackend) -> None:
        asked = {"name": "answer", "schema": self.schema, "strict": True}
        backend.in_chats = {"response_format": {"type": "json_schema", "json_schema": asked}}


MEASUREMENT = Measurement(
    name="json_schema",
    option=(
        Path | None,
        under("Servers")(
            "Ask servers for answers that a JSON Schema allows (response_format of chats), and score whether they are.",
            metavar="FILE",
            needs=(
                Condition(
                    rules.is_alone,
                    "{flag} needs --server alone, without --model, --target and --launch: a judge here does not know "
                    "what a schema forbids",
                ),
            ),
            conflicts=(
                Condition(
                    lambda options: options.score is not None, "--score and {flag} both score; leave one of them out"
                ),
            ),
            in_race=False,
        ),
    ),
    opens=lambda options, methods: SchemaRequest(options.json_schema),
    entry=str,
    difference=("sampling", "JSON schema"),
)
