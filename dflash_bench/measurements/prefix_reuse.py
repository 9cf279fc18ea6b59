"""Prefix reuse on servers, as in service; without it, prefix caches are emptied or bypassed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_bench.core.measurement import Instrument, Measurement
from dflash_bench.core.option import under
from dflash_bench.runner import rules

if TYPE_CHECKING:
    from dflash_bench.servers.backend import ServerBackend


class PrefixReuse(Instrument):
    def connected(self, backend: ServerBackend) -> None:
        """Raise UserError if no server's prefix cache is emptied anyway."""
        backend.reuse_prefixes()


MEASUREMENT = Measurement(
    name="prefix_reuse",
    option=(
        bool,
        under("Servers")(
            "Let servers reuse what prompts share, as they would in service: the turns of a session, above all. "
            "Default: every prompt is read whole, so that answers do not depend on those before them.",
            default=False,
            needs=(rules.SERVERS,),
            in_race=False,
        ),
    ),
    opens=lambda options, methods: PrefixReuse(),
)
