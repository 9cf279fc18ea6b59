"""The table of methods: names, options, weights, and the syntax in which users write them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dflash_bench.core import plugins
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.plugins import Registry

Value = int | float | str
Shape = Literal["none", "chain", "tree"]


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a method: a number from `low` to `high`, both included, or one of `words`.

    If the default is None, the preset, the draft or the engine decides.
    """

    name: str
    summary: str
    default: Value | None = None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    words: tuple[str, ...] = ()
    kind: type[int] | type[float] | type[str] = int
    is_file: bool = False
    """Whether the value is a file path; the file's content is then part of a run's identity."""

    @property
    def range(self) -> str:
        """Describe the allowed values: `2 to 64 tokens, or auto`."""
        numbers = "" if self.kind is str else f"{self.low:g} to {self.high:g} {self.unit}".rstrip()
        return ", or ".join(part for part in (numbers, " or ".join(self.words)) if part) or "text"

    def read(self, text: str) -> Value | None:
        """Parse a value; return None if the option does not allow it."""
        if text in self.words:
            return text
        if self.kind is str:
            return None if self.words or not text else text
        if not re.fullmatch("[0-9]+" if self.kind is int else r"-?[0-9]+(\.[0-9]+)?(e-?[0-9]+)?", text):
            return None
        # With 0 added, -0 is 0.
        value = int(text) if self.kind is int else float(text) + 0.0
        assert self.low is not None and self.high is not None
        return value if self.low <= value <= self.high else None


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """An entry of the table of methods."""

    name: str
    summary: str
    weights: str | None
    """The draft that it needs, as in `--draft METHOD=PATH`; None: no weights."""
    shape: Shape
    """Shape of the draft of one round."""
    lossless: bool
    """Whether its output is the target's: the same tokens at temperature 0, and the same distribution above."""
    options: tuple[Option, ...] = ()
    count: str | None = None
    """The option that NAME:N sets: tokens drafted per round, not counting the anchor."""
    alternatives: tuple[frozenset[str], ...] = ()
    """Sets of options with the same meaning, so that only one of each set may be given."""
    is_probe: bool = False
    """Whether it measures the engine regardless of a draft's quality; its acceptance is then not judged."""
    is_recorded: bool = False
    """Whether every round drafts equally many tokens, from the committed text alone, independent of earlier rounds."""
    is_ranked: bool = False
    """Whether it drafts chains whose tokens are all chosen by logits over its vocabulary or over candidates."""
    module: str | None = None
    """Module of its `build(models, target, method)`; None: the file in `engine/drafters/` with the method's name."""

    def option(self, name: str) -> Option:
        """Return the option of this name. Raises UserError if it does not exist."""
        for option in self.options:
            if option.name == name:
                return option
        raise unknown(f"option of method {self.name}", name, [option.name for option in self.options])

    def read(self, text: str, where: str) -> dict[str, Value]:
        """Parse the text after the colon. Raises UserError, which begins with `where`, for any error in it."""
        if not self.options:
            raise UserError(f"{where}: {shown(self.name)} has no options; write it without ':'")
        if not text:
            raise UserError(f"{where}: nothing follows the colon; omit it, or write {self._example}")
        if "=" not in text:
            name = self._counted(text, where)
            return {name: self._value(name, text, where)}
        options: dict[str, Value] = {}
        for part in text.split(","):
            name, equals, value = part.partition("=")
            if not equals:
                raise UserError(f"{where}: '{part}' is not KEY=VALUE; write {self._example}")
            if name in options:
                raise UserError(f"{where}: {name} is given twice; give it once")
            options[name] = self._value(name, value, where)
        self._refuse_alternatives(options, where)
        return {option.name: options[option.name] for option in self.options if option.name in options}

    def write(self, options: Mapping[str, Value]) -> str:
        """Format options in canonical form: in the table's order, and the count without its name if it stands alone."""
        if options.keys() == {self.count} and all(isinstance(value, int) for value in options.values()):
            return str(*options.values())
        given = [option.name for option in self.options if option.name in options]
        return ",".join(f"{name}={_text(options[name])}" for name in given)

    def _refuse_alternatives(self, options: Mapping[str, Value], where: str) -> None:
        for group in self.alternatives:
            given = [option.name for option in self.options if option.name in group & options.keys()]
            if len(given) > 1:
                raise UserError(f"{where}: {' and '.join(given)} set the same thing; give one of them")

    def _counted(self, text: str, where: str) -> str:
        """Return the option that a bare value sets. Raises UserError if there is none."""
        if self.count is not None:
            return self.count
        raise UserError(f"{where}: '{text}' is not KEY=VALUE; write {self._example}")

    def _value(self, name: str, text: str, where: str) -> Value:
        option = self.option(name)
        if (value := option.read(text)) is None:
            raise UserError(f"{where}: {name} must be {option.range}, not '{text}'")
        return value

    @property
    def _example(self) -> str:
        names = ", ".join(option.name for option in self.options)
        return (f"{self.name}:N or " if self.count else "") + f"{self.name}:KEY=VALUE,... with {names}"


def _text(value: Value) -> str:
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


# A method is written NAME[@LABEL][:KEY=VALUE,...], or NAME[@LABEL]:N for the number of tokens that it drafts per round.
# To add one, add an entry here and a file of the same name in `engine/drafters/`.


MAX_BLOCK = 64
MAX_DRAFTS = MAX_BLOCK - 1
"""Tokens drafted in the widest block, not counting the anchor."""

_BLOCK = Option(
    "block",
    "size of the block, including the anchor; by default as the draft was trained",
    None,
    2,
    MAX_BLOCK,
    "tokens",
)
_RULE = Option(
    "rule",
    "above temperature 0: match keeps drafted tokens that the target draws, too; rejection draws drafts from "
    "their own distribution and compares probabilities with the target's",
    "match",
    words=("match", "rejection"),
    kind=str,
)
_SHIFT = Option(
    "shift",
    "each slot predicts the token after it: for JetSpec's heads, whose files do not say; by default no",
    words=("no", "yes"),
    kind=str,
)
_PACED = "auto chooses by costs measured during the run, so that counts differ from run to run"

_SEED = Option("seed", "random seed", 0, 0, 999_999)


def _drafted(name: str, default: int) -> Option:
    return Option("n", f"tokens drafted per round at most, the same as {name}:N", default, 1, MAX_DRAFTS, "tokens")


_OWN: dict[str, MethodSpec] = {
    kind.name: kind
    for kind in (
        MethodSpec(
            "ar", "plain decoding, one token per forward pass; always runs, as the baseline", None, "none", True
        ),
        MethodSpec(
            "dflash", "block diffusion: one pass of the draft fills a whole block (arXiv 2602.06036)", "dflash",
            "chain", True,
            (
                replace(_BLOCK, summary=f"{_BLOCK.summary}; {_PACED}", words=("auto",)),
                Option("n", "tokens drafted per round, the same as dflash:N", None, 1, MAX_DRAFTS, "tokens"),
                Option("steps", "passes of the draft over a block; each fixes its most certain tokens", 1, 1, 16,
                       "passes"),
                _RULE,
                Option("cut", "for drafts with a confidence head: nothing is verified from the first token below this "
                       f"confidence on; {_PACED}", "off", 0, 1, words=("off", "auto"), kind=float),
                _SHIFT,
            ),
            count="n", alternatives=(frozenset({"block", "n"}),), is_recorded=True, is_ranked=True,
        ),
        MethodSpec(
            "ddtree", "a tree of the likeliest paths through one DFlash block (DDTree; PCTree for DFlash 2 and DSpark)",
            "dflash", "tree", True,
            (
                Option("nodes", f"nodes of the tree, not counting the anchor; all are verified; {_PACED}", 32, 1, 255,
                       "nodes", ("auto",)),
                Option("top_k", "candidate tokens at each slot of the block, by default as many as nodes; in PCTree "
                       "the children of a node and nodes expanded at each depth, by default 4", None, 1, 255,
                       "tokens"),
                _BLOCK, _SHIFT,
                Option("tree", "best: the likeliest nodes; expanded: in turn all top_k children, by default 7, of the "
                       "likeliest node that has none, as JetSpec does", "best", words=("best", "expanded"), kind=str),
            ),
            count="nodes",
        ),
        MethodSpec(
            "eagle3", "a chain, drafted token by token from the target's features (arXiv 2503.01840)", "eagle3",
            "chain", True,
            (Option("n", "tokens drafted per round, the same as eagle3:N", 7, 1, MAX_DRAFTS, "tokens"),), count="n",
            is_recorded=True, is_ranked=True,
        ),
        MethodSpec(
            "eagle3-tree", "EAGLE-3 as a tree that grows where the draft is confident (arXiv 2406.16858)", "eagle3",
            "tree", True,
            (
                Option("nodes", "nodes of the tree, not counting the anchor; all are verified", 59, 1, 255, "nodes"),
                Option("top_k", "nodes expanded at each level, and children of each", 10, 1, 64, "nodes"),
                Option("depth", "levels of the tree below the anchor", 8, 1, 32, "levels"),
            ),
        ),
        MethodSpec(
            "p-eagle", "P-EAGLE: an EAGLE-3 draft that fills masks, all tokens of a round in one pass", "p-eagle",
            "chain", True,
            (
                Option("n", "tokens drafted per round, the same as p-eagle:N; by default the draft's own number, or 5",
                       None, 1, MAX_DRAFTS, "tokens"),
                _RULE,
            ),
            count="n", is_ranked=True,
        ),
        MethodSpec(
            "mtp", "multi-token prediction: heads from the target's own checkpoint draft token by token", "mtp",
            "chain", True,
            (Option("n", "tokens drafted per round, the same as mtp:N", 3, 1, 6, "tokens"), _RULE), count="n",
            is_recorded=True, is_ranked=True,
        ),
        MethodSpec(
            "ngram", "prompt lookup: what followed the last tokens where they occurred before", None, "chain", True,
            (
                _drafted("ngram", 10), Option("max", "longest n-gram looked up", 3, 1, 32, "tokens"),
                Option("min", "shortest n-gram looked up", 1, 1, 32, "tokens"),
                Option("prompt", "copy from the prompt, too", "yes", words=("yes", "no"), kind=str),
            ),
            count="n",
        ),
        MethodSpec(
            "dflash+ngram", "a DFlash block; where a long passage repeats, what followed it, without a draft pass",
            "dflash", "chain", True,
            (
                _BLOCK, Option("n", "tokens of a block, the same as dflash+ngram:N", None, 1, MAX_DRAFTS, "tokens"),
                Option("match", "repeated tokens from which on no block is drafted", 8, 1, 64, "tokens"),
                Option("copy", "tokens drafted in that case", 16, 1, MAX_DRAFTS, "tokens"),
            ),
            count="n", alternatives=(frozenset({"block", "n"}),),
        ),
        MethodSpec(
            "suffix", "suffix decoding: what followed most often, here or in earlier answers (arXiv 2411.04975)", None,
            "chain", True,
            (
                _drafted("suffix", 16),
                Option("depth", "longest passage counted, match and draft", 64, 2, 256, "tokens"),
                Option("threshold", "least estimated probability of a drafted token", 0.1, 0, 1, kind=float),
                Option("factor", "tokens drafted at most per matched token", 1.0, 0.1, 16, kind=float),
                Option("earlier", "use the run's answers to other prompts, too", "yes", words=("yes", "no"), kind=str),
            ),
            count="n",
        ),
        MethodSpec(
            "rest", "a tree of what followed most often in a datastore of texts (arXiv 2311.08252)", None, "tree", True,
            (
                Option("datastore", "a file made by build-datastore; required", kind=str, is_file=True),
                Option("nodes", "nodes of the tree, not counting the anchor", 15, 1, 255, "tokens"),
                Option("depth", "levels of the tree below the anchor", 10, 1, 32, "levels"),
                Option("max", "longest suffix looked up", 16, 1, 32, "tokens"),
                Option("min", "shortest suffix looked up", 1, 1, 32, "tokens"),
            ),
        ),
        MethodSpec(
            "lookahead", "the target itself guesses several positions ahead (arXiv 2402.02057)", None, "tree", True,
            (
                Option("window", "columns of guesses, W in the paper", 5, 1, 32, "columns"),
                Option("ngram", "tokens of an n-gram, N in the paper", 4, 2, 8, "tokens"),
                Option("guesses", "n-grams verified per round, G in the paper", 5, 1, 32, "n-grams"),
            ),
        ),
        MethodSpec(
            "oracle", "the plain answer itself; measures the engine, not a draft", None, "chain", True,
            (_drafted("oracle", 15),), count="n", is_probe=True,
        ),
        MethodSpec(
            "random", "random tokens; measures the engine, not a draft", None, "chain", True,
            (_drafted("random", 15), _SEED), count="n", is_probe=True,
        ),
        MethodSpec(
            "synthetic", "tokens that are right at given rates; measures the engine, not a draft", None, "chain", True,
            (
                Option("rates", "for each token, the share that is right if all before it are", "0.9/0.8/0.7/0.6/0.5",
                       kind=str),
                Option("profile", "a speculation_profile.json to take the rates from, as 'card --profile' writes it",
                       kind=str, is_file=True),
                Option("category", "of the profile, the category to take them from; by default all prompts", kind=str),
                Option("base", "for --launch: the method, such as dflash, whose draft a server drafts with; it then "
                       "accepts at these rates, right or wrong, and its answers are not the model's", kind=str),
                _SEED,
            ),
            alternatives=(frozenset({"rates", "profile"}),), is_probe=True,
        ),
        MethodSpec(
            "draft-model", "a small language model with the same tokenizer drafts token by token (arXiv 2211.17192)",
            "draft-model", "chain", True,
            (
                Option("n", "tokens drafted per round, the same as draft-model:N", 7, 1, MAX_DRAFTS, "tokens"),
                _RULE,
            ),
            count="n", is_recorded=True, is_ranked=True,
        ),
        MethodSpec(
            "medusa", "heads on the target's last hidden state guess the next tokens, as a tree (arXiv 2401.10774)",
            "medusa", "tree", True,
            (
                Option("heads", "heads used, nearest first; by default all", None, 1, 64, "heads"),
                Option("nodes", "nodes of the tree, not counting the anchor; all are verified", 63, 1, 255, "tokens"),
                Option("top_k", "candidate tokens of each head; with 1 the tree is a chain", 10, 1, 64, "tokens"),
            ),
            is_ranked=True,
        ),
        MethodSpec(
            "block-diffusion",
            "a language model that fills in blocks by itself, unverified (arXiv 2509.26328)",
            "block-diffusion", "chain", False,
            (
                Option(
                    "block", "tokens filled in together; by default the model's own", None, 2, MAX_BLOCK,
                    "tokens",
                ),
                Option("threshold", "probability from which on a guess is kept", 0.9, 0, 1, kind=float),
            ),
        ),
        MethodSpec(
            "diffuspec",
            "a diffusion language model drafts, by a path searched through its guesses (arXiv 2510.02358)",
            "block-diffusion", "chain", True,
            (
                _drafted("diffuspec", 30),
                Option("least", "tokens drafted at least", 20, 1, MAX_DRAFTS, "tokens"),
                Option("beam", "paths kept from place to place", 3, 1, 64, "paths"),
                Option("share", "share of the draft in a token's score, beside an n-gram model", 0.5, 0, 1, kind=float),
                Option("top_k", "guesses considered at each place", 15, 1, 64, "tokens"),
                Option("mass", "probability that the considered guesses have together", 0.8, 0, 1, kind=float),
            ),
            count="n",
        ),
        MethodSpec(
            "specdiff2",
            "a diffusion language model drafts a tree, sampled from one pass (arXiv 2511.00606)",
            "block-diffusion", "tree", True,
            (
                _drafted("specdiff2", 16),
                Option("samples", "drafts sampled per round", 8, 1, 16, "drafts"),
                Option("temperature", "sampling temperature of drafts; 0: the likeliest tokens", 1.0, 0, 4, kind=float),
                _SEED,
            ),
            count="n",
        ),
    )
}  # fmt: skip
SYNTHETIC = "synthetic"
WEIGHTS = tuple(dict.fromkeys(kind.weights for kind in _OWN.values() if kind.weights))
"""Kinds of drafts that `--draft` takes, with or without a label."""


def _of_plugin(name: str, found: object) -> MethodSpec:
    """Return a plug-in's object. Raises TypeError unless it is a method without a draft, or with one we can load."""
    if not isinstance(found, MethodSpec) or found.name != name or found.module is None:
        raise TypeError(
            f"it must be a dflash_bench.core.methods.MethodSpec named '{name}', with the module of its build()"
        )
    if found.weights not in (None, *WEIGHTS):
        raise TypeError(f"weights is '{found.weights}'; it can be None, {', '.join(WEIGHTS)}")
    return found


BASELINE = "ar"
"""Autoregressive decoding, the baseline of all methods."""
PLAIN = "plain"
"""The name of `BASELINE` for people, who may also type it; data holds the label."""
METHODS: Registry[MethodSpec] = Registry(plugins.DRAFTERS, _OWN, _of_plugin)


@dataclass(frozen=True, slots=True)
class Method:
    """A method as the user chose it; `label` is the canonical spelling, under which results are stored."""

    label: str
    name: str
    tag: str | None = None
    """Label of its draft: `a` in dflash@a."""
    options: Mapping[str, Value] = field(default_factory=dict)

    @property
    def kind(self) -> MethodSpec:
        return METHODS[self.name]

    @property
    def draft(self) -> str | None:
        """Return the key of its draft: `dflash`, or `dflash@a`; None for a method without weights."""
        return draft_of(self.label)

    def option(self, name: str) -> Value | None:
        """Return an option's value or default. Raises UserError for an option that the method does not have."""
        return self.options.get(name, self.kind.option(name).default)

    def number(self, name: str) -> int:
        """Return the value of an option that is a whole number and has a default."""
        value = self.option(name)
        assert isinstance(value, int), f"{name} of {self.label} is {value!r}"
        return value

    def real(self, name: str) -> float:
        """Return the value of an option that is a number and has a default."""
        value = self.option(name)
        assert isinstance(value, int | float), f"{name} of {self.label} is {value!r}"
        return float(value)

    def leaves_open(self, name: str) -> bool:
        """Return whether it has this option and the user gave neither it nor an equivalent."""
        same = {name}.union(*(group for group in self.kind.alternatives if name in group))
        return any(option.name == name for option in self.kind.options) and not same & self.options.keys()

    def with_option(self, name: str, value: Value) -> Method:
        """Return the method with this option added, also to its label. Raises UserError like `parse`."""
        return _method(self.kind, self.tag, {**self.options, self.kind.option(name).name: value})

    def with_count(self, count: int | None) -> Method:
        """Return the method with a preset's number of drafted tokens, if the user gave none; the label is unchanged."""
        name = self.kind.count
        if count is None or name is None or not self.leaves_open(name):
            return self
        return replace(self, options={**self.options, name: count})


def parse(text: str) -> Method:
    """Parse a method as typed. Raises UserError for an unknown name or option, or an invalid value."""
    head, colon, rest = (BASELINE if text == PLAIN else text).partition(":")
    name, at, tag = head.partition("@")
    if name not in METHODS:
        raise unknown("method", name, list(map(shown, METHODS)))
    kind, where = METHODS[name], f"method '{text}'"
    if at and kind.weights is None:
        raise UserError(f"{where}: {shown(name)} uses no draft, so it takes no label; write it without '@'")
    if at:
        check_tag(tag, where)
    return _method(kind, tag or None, kind.read(rest, where) if colon else {})


def _method(kind: MethodSpec, tag: str | None, options: Mapping[str, Value]) -> Method:
    label = f"{kind.name}@{tag}" if tag else kind.name
    if not options:
        return Method(label, kind.name, tag)
    label += f":{kind.write(options)}"
    return Method(label, kind.name, tag, kind.read(label.partition(":")[2], f"method '{label}'"))


def shown(label: str) -> str:
    """Return a method's label as people read it."""
    return PLAIN if label == BASELINE else label


def chosen(texts: Sequence[str]) -> list[Method]:
    """Return the methods of a run, each once, with plain decoding first."""
    return list({method.label: method for method in (parse(BASELINE), *map(parse, texts))}.values())


def check_tag(tag: str, where: str) -> None:
    """Raise UserError for a label after '@' that could be mistaken for something else."""
    if not re.fullmatch("[A-Za-z0-9._-]{1,32}", tag):
        raise UserError(f"{where}: after '@' comes a label of 1 to 32 letters, digits, '.', '_' or '-'")


def name_of(label: str) -> str:
    """Return the method's name for a label of any version."""
    return re.split("[@:]", label, maxsplit=1)[0]


def draft_of(label: str) -> str | None:
    """Return the key of the draft behind a label: `eagle3@a` for eagle3-tree@a:nodes=9."""
    if (base := base_of(label)) is not None:
        return draft_of(base)
    name, at, tag = label.partition(":")[0].partition("@")
    weights = METHODS[name].weights if name in METHODS else None
    return weights and f"{weights}{at}{tag}"


def base_of(label: str) -> str | None:
    """Return the method whose draft a server drafts with while it accepts at imposed rates: `dflash` for
    synthetic:rates=0.9,base=dflash. None where acceptance is the target's own."""
    options = label.partition(":")[2].split(",") if name_of(label) == SYNTHETIC else []
    return next((option.removeprefix("base=") for option in options if option.startswith("base=")), None)


def is_imposed(label: str) -> bool:
    """Return whether drafts are accepted at given rates, right or wrong; answers are then neither judged nor scored."""
    return base_of(label) is not None


def refuse_imposed(method: Method) -> None:
    """Raise UserError for a method that only a launched server supports."""
    if is_imposed(method.label):
        raise UserError(
            f"method {method.label}: base= has no effect here, where drafts are made right at the rates; leave it out, "
            "or add --launch PROGRAM"
        )


def users_of(draft: str) -> list[str]:
    """Return the methods that use a draft such as `dflash@a`, with its label."""
    weights, at, tag = draft.partition("@")
    return [f"{kind.name}{at}{tag}" for kind in METHODS.values() if kind.weights == weights]


def is_tree(label: str) -> bool:
    """Return whether the label's method drafts trees."""
    kind = METHODS.get(name_of(label))
    return kind is not None and kind.shape == "tree"


def is_lossy(label: str) -> bool:
    """Return whether the answers may differ from the target's own; they are then not judged."""
    kind = METHODS.get(name_of(label))
    return kind is not None and (not kind.lossless or is_imposed(label))


def is_probe(label: str) -> bool:
    """Return whether the label's method measures the engine rather than a draft."""
    kind = METHODS.get(name_of(label))
    return kind is not None and kind.is_probe


def has_draft(label: str) -> bool:
    """Return whether it drafts with a trained network; True for unknown methods."""
    kind = METHODS.get(name_of(label))
    return kind is None or kind.weights is not None
