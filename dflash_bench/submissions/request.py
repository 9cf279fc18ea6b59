"""The options of `accept`, and the request to measure a submitted run again, from the options that its pack stores.

Everything in a pack is untrusted: values are checked against the types of the options, and files that the sender names
are never read here, where they are others if they exist at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import Method
from dflash_bench.core.types import CEILINGS
from dflash_bench.models import presets
from dflash_bench.models.hub import COMMIT
from dflash_bench.models.presets import Preset, parse_drafts
from dflash_bench.results.plan import BASELINE
from dflash_bench.results.run_info import RunIdentity, RunInfo
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import methods_and_model, parse
from dflash_bench.runner.requests import request_of
from dflash_bench.runner.setup import default_dtype, pinned
from dflash_bench.tasks.scorers.base import EVALUATED

OF_THE_RUNNER = frozenset(
    """
    servers dialect served_model api_key_env timeout env_proxy launch launch_with launch_args rate clients concurrency
    slo shard unsafe_code energy prefix_reuse device device_map engine kernels graph compile
    tensor_parallel threads workers ray_address
    """.split()
)
"""Options that do not decide the tokens: device, servers, concurrency. Answers are recomputed one at a time."""


@dataclass(frozen=True, slots=True)
class AcceptRequest:
    """Options of `accept`."""

    pack: Path
    share: float = 0.05
    """The share of answers to sample."""
    seed: int | None = None
    """The seed of the sample; None: a random one, which the submitter cannot predict."""
    by: str | None = None
    target: str | None = None
    """The target on this machine; None: the reference in the submitted run."""
    drafts: tuple[str, ...] = ()
    data: str | None = None
    prompts: Path | None = None
    trust_remote_code: bool = False

    @property
    def own_parts(self) -> frozenset[str]:
        """The parts of the model that are given for this machine: `target`, and names of drafts."""
        return frozenset([*parse_drafts(self.drafts), *(["target"] if self.target is not None else [])])


@dataclass(frozen=True, slots=True)
class RebuiltRequest:
    """The request, methods and model of a submitted run, for planning it on this machine; pinned to its commits."""

    request: RunRequest
    methods: list[Method]
    model: Preset
    is_served: bool
    """Whether servers measured the run; only the target is then loaded, as the judge."""


def rebuild(request: AcceptRequest, info: RunInfo) -> RebuiltRequest:
    """Rebuild the request of a run from its stored options and the user's own.

    Raises UserError for options of the wrong type, and for files of the sender that the user must replace by copies.
    """
    options = _typed(request.pack, info)
    is_served = bool(info.identity.servers)
    if is_served:
        options |= {"methods": (BASELINE,), "drafts": (), "block_size": None, "draft_steps": None, "quantize": None}
    options["over"] = () if is_served else _of_methods(options.get("over", ()))
    _refuse_files(options, request)
    own = {"target": request.target, "data": request.data, "prompts": request.prompts}
    options |= {name: value for name, value in own.items() if value is not None}
    if request.target is not None:
        options["model"] = None
    if request.drafts:
        drafts = parse_drafts(options["drafts"]) | parse_drafts(request.drafts)
        options["drafts"] = tuple(f"{name}={path}" for name, path in drafts.items())
    # This machine may compute in another dtype by default.
    options["dtype"] = options.get("dtype") or _default_dtype(info.identity, is_served)
    # Remote code runs only if the user of `accept` allows it, whatever the submitted options say.
    asked = request_of(**{**options, "trust_remote_code": request.trust_remote_code, "date": info.identity.date})
    if is_served and not asked.has_target:
        raise UserError(
            f"{request.pack} was measured on servers: pass their target with --target, to judge the answers"
        )
    asked, methods, model = methods_and_model(asked)
    _refuse_files_of(methods, request.pack)
    return RebuiltRequest(asked, methods, _pinned(model, asked, info.identity, request), is_served)


def _typed(pack: Path, info: RunInfo) -> dict[str, Any]:
    """Return the stored options that decide the tokens, in the types of the request's fields."""
    types = get_type_hints(RunRequest)
    options = {name: value for name, value in info.options.to_json().items() if name not in OF_THE_RUNNER}
    for name, value in options.items():
        if name in types:  # `request_of` names an unknown one
            try:
                options[name] = TypeAdapter(types[name]).validate_python(value)
            except ValidationError as error:
                fault = error.errors(include_url=False)[0]["msg"]
                raise UserError(f"cannot read {pack}: its option {name} is not as a run stores it ({fault})") from error
    return {"drafts": (), **options}


def _of_methods(axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes of --over that vary methods: those of settings are stored as the options that they set."""
    return tuple(text for text in axes if not any(axis.is_of_settings for axis in parse([text])))


def _default_dtype(identity: RunIdentity, is_served: bool) -> str | None:
    """Return the dtype that the run, or the judge of its servers' answers, used by default."""
    if is_served:
        return identity.judge.dtype if identity.judge is not None and identity.judge.dtype in CEILINGS else None
    return None if identity.device is None else default_dtype(identity.device)


def _refuse_files(options: Mapping[str, Any], request: AcceptRequest) -> None:
    pack, score = request.pack, options.get("score") or ""
    if options.get("prompts") is not None and request.prompts is None:
        raise UserError(f"{pack} was measured on the submitter's own prompts: pass your copy with --prompts")
    if options.get("data") not in (None, "embedded", "hub") and request.data is None:
        raise UserError(
            f"{pack} was measured on a local folder of suites: pass yours with --data FOLDER, or --data hub"
        )
    if (path := options.get("json_schema")) is not None:
        raise UserError(f"{pack} was measured with the submitter's file {path}, and cannot be recomputed")
    if score.startswith(EVALUATED) and Path(score.removeprefix(EVALUATED)).exists():
        raise UserError(f"{pack} was scored by the submitter's folder {score}, and cannot be recomputed")


def _refuse_files_of(methods: Collection[Method], pack: Path) -> None:
    for method in methods:
        if any(option.is_file and method.option(option.name) is not None for option in method.kind.options):
            raise UserError(f"{pack} was measured with the submitter's file, {method.label}, and cannot be recomputed")


def _pinned(model: Preset, asked: RunRequest, identity: RunIdentity, request: AcceptRequest) -> Preset:
    """Return the model with the commits of the run. Raises UserError for weights in folders of the sender."""
    stored = {part: one or "" for part, one in identity.revisions.items() if part not in request.own_parts}
    of_table = presets.table().get(asked.model or ("nano" if asked.target is None else ""))
    named = {"target": model.target, **model.drafts}
    known = {} if of_table is None else {"target": of_table.target, **of_table.drafts}
    commits = {}
    for part, reference in named.items():
        id_, _, commit = stored.get(part, "").partition("@")
        if COMMIT.fullmatch(commit) and id_ == reference.partition("@")[0]:
            commits[part] = stored[part]
        elif part not in request.own_parts and known.get(part) != reference:
            option = "--target PATH" if part == "target" else f"--draft {part}=PATH"
            raise UserError(f"{request.pack} was measured with weights from {reference}: pass your copy with {option}")
    return pinned(model, commits)
