"""`conform` against real vLLM servers on a CPU: every golden case, or vLLM's own reason for not loading it.

Its attention has no heads as narrow as the cases', which are written with wider ones that compute the same, as our
engine shows. What differs is asked again with the context keys normed layer by layer (`vllm_plugin`), and JetSpec with
the key by which vLLM is told that a block is causal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import served
import torch
import widened
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from dflash_bench.core import methods
from dflash_bench.core.dialects import LaunchSpec
from dflash_bench.core.draft_kinds import name_of_kind
from dflash_bench.core.errors import UserError
from dflash_bench.diagnose import conform, conform_server, golden_cases
from dflash_bench.diagnose.conform import Conformance, forwards_named
from dflash_bench.diagnose.golden_cases import GoldenCase
from dflash_bench.models import targets
from dflash_bench.models.convert import convert
from dflash_bench.runner.config import RunRequest
from dflash_bench.servers.launch import program_named

pytestmark = pytest.mark.vllm
HERE = Path(__file__).parent / "servers"
PROGRAM, PLUGINS = HERE / "vllm_server_here", HERE / "vllm_plugin"
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""That vLLM's attention on the CPU has."""
ROOM, MEMORY_SHARE = 32, 0.2
"""ROOM: where its context ends it drafts otherwise."""
PER_LAYER, CAUSAL = "norm per layer", "told it is causal"
JETSPEC, P_EAGLE = "jetspec-causal-head", "specforge-p-eagle"
LOADED = {"book-dflash-experts", JETSPEC, P_EAGLE, "zlab-causal-full"}
PLAIN = "read as plain DFlash (bidirectional)"
REASONS = re.compile(
    r"(No module named '\w+')|Value error, (.+?)(?:\. Supported architectures| \[type=)|^\w*Error: (.+)$"
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A case, as a server is started for it."""

    case: GoldenCase
    words: tuple[str, ...] = ()
    """Additional changes for it, from PER_LAYER and CAUSAL."""

    def asked(self, folder: Path) -> Conformance:
        """Start the server and ask it; `inapplicable` if it does not start, with its reason."""
        launch = self._written(folder)
        vllm = program_named("vllm")
        with ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            if PER_LAYER in self.words:
                patch.setenv("PYTHONPATH", str(PLUGINS))
            try:
                (url,) = stack.enter_context(served.started(vllm, PROGRAM, [launch], folder / "logs")).values()
            except UserError:
                (log,) = (folder / "logs").iterdir()
                return Conformance(self.case, "vllm", "inapplicable", reason(log.read_text(errors="replace")))
            found = conform_server.check_server(self.case, RunRequest(servers=(url,)), lambda told: None)
        return replace(found, reader=", ".join([found.reader, *self.words]))

    def _written(self, folder: Path) -> LaunchSpec:
        """Write what the server loads. Raises AssertionError if our engine does not draft the same with it."""
        case, draft, changed = self.case, self.case.draft, {"is_causal": True} if CAUSAL in self.words else {}
        if case.kind == "p-eagle":
            # vLLM knows P-EAGLE in speculators' format.
            convert(str(draft), folder / "converted", "speculators", str(case.target))
            draft = folder / "converted"
        width = widened.width_of([one for one in (case.target, draft) if one], HEAD_DIMS)
        # Its answers end at their limit: no token ends them.
        widened.widen(case.target, folder / "target", width, {"eos_token_id": None, "pad_token_id": None})
        if draft is not None:
            widened.widen(draft, folder / "draft", width, changed)
        wide = replace(case, target=folder / "target", draft=draft and folder / "draft")
        (found,) = conform.check_engine([wide], forwards_named(["transformers"]), RunRequest(), lambda told: None)
        assert found.state == "equal", found.why or found.difference
        tokenizer(targets.shape_of(case.target).vocab_size).save_pretrained(folder / "target")
        longest = max(len(one.prompt) + one.max_new_tokens for one in case.prompts)
        return LaunchSpec(
            methods.parse(case.method),
            "case",
            str(wide.target),
            wide.draft and str(wide.draft),
            case.num_drafts,
            longest + ROOM,
            1,
            "float32",
            MEMORY_SHARE,
            kind=name_of_kind(case.kind),
        )


def tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer in name only: prompts are ids."""
    words = {f"t{number}": number for number in range(size)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0")))


def reason(log: str) -> str:
    """Why vLLM did not start, in its own words."""
    found = [next(filter(None, match.groups())) for line in log.splitlines() if (match := REASONS.search(line))]
    # Where it lists functions, their addresses are others each time.
    return re.sub(r": <function \w+ at 0x\w+>", "", "; ".join(dict.fromkeys(found)) or log[-500:])


def attempts(case: GoldenCase, folder: Path) -> Iterator[Conformance]:
    """Yield what vLLM drafts as released, and what it drafts where the causes of a difference are taken away."""
    done: tuple[str, ...] = ()
    for word in (None, PER_LAYER, *([CAUSAL] if case.kind == "jetspec" else [])):
        done = done if word is None else (*done, word)
        found = Attempt(case, done).asked(folder / str(len(done)))
        yield found
        if found.state != "differs":
            return


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory,
    write_page: Callable[[str, Sequence[str]], None],
    command: Callable[[str], str],
    server_environment: Callable[[str], Path],
) -> list[Conformance]:
    torch.set_num_threads(1)
    assert server_environment("vllm").is_dir()
    folder = tmp_path_factory.mktemp("vllm")
    results = []
    for name in golden_cases.known_cases():
        served.show(f"vLLM: {name}")
        results += attempts(golden_cases.read_case(name), folder / name)
    write_page("servers/conformance-vllm.md", served.conformance_page(results, "vLLM", command("vllm"), ABOUT))
    return results


ABOUT = f"""Each case is asked of vLLM on the CPU, in float32. Heads are written wider, with zeros, so that its
attention takes them; our engine drafts with these files what the publisher's code drafts. A case that differs is
asked again without a fault of this vLLM, [measured by itself](vllm-nano-cpu.md): its norm kernel uses the first
layer's weight for the context keys of every draft layer ("{PER_LAYER}": without it). JetSpec's file says that it is
causal by a key that vLLM does not know, and is asked once more with `is_causal` ("{CAUSAL}"). P-EAGLE is converted to
speculators' format.

What is not computed here, vLLM may compute on a GPU: DSpark, DFlash 2, LiLiCorr and drafts with windows in some
layers need its runner V2, and this a Triton that the CPU build lacks; Qwen3.5, and with it MTP, needs torchvision,
which has no build for this torch here. Its reasons below are in its own words."""


def test_what_vllm_loads_conforms_but_for_the_causes_that_are_known(found: list[Conformance]) -> None:
    loaded: dict[str, list[Conformance]] = {}
    for one in found:
        if one.state != "inapplicable":
            loaded.setdefault(one.case.name, []).append(one)
    assert loaded.keys() == LOADED
    for name, results in loaded.items():
        # The text is always the target's own.
        assert all("tokens" in one.compared and getattr(one.difference, "part", "") != "tokens" for one in results)
        assert results[-1].state == "equal", name
    (told,) = [one for one in loaded[JETSPEC] if PER_LAYER in one.reader and CAUSAL not in one.reader]
    assert PLAIN in [one.reading for one in told.explanations]


def test_what_vllm_does_not_load_it_names(found: list[Conformance]) -> None:
    assert all(one.why for one in found if one.state == "inapplicable")
