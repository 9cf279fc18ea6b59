"""Acceptance and speed-up by block size, as Markdown. Usage: python scripts/block_sizes.py RUN, a sweep over block."""

import sys
from pathlib import Path

from dflash_bench import environment
from dflash_bench.analysis.metrics import FORMULAS
from dflash_bench.report import document, sweeps


def main(folder: str) -> None:
    run = document.read_document(Path(folder))
    swept = [sweep for sweep in run.sweeps if sweep.option == "block"]
    info = run.results.info
    print(
        "# Block size: acceptance and speed-up\n\n"
        "```\nscripts/block_sizes\n```\n\n"
        f"{environment.one_line(info['environment'])}.\n\n"
        "The paper trains drafts at several block sizes and runs each at several. nano has one DFlash draft, trained\n"
        "at 16, so that here the size varies at inference only. A size counts the anchor. 16 prompts a suite,\n"
        "from the generator of texts that nano and its draft were trained on; greedy, float32, one thread.\n\n"
        "![acceptance and speed-up by block size](block-sizes-nano-cpu.svg)\n"
    )
    print("\n\n".join(sweeps.sweep_paragraphs(swept, info)), end="\n\n")
    print(
        "\n".join(f"- `{name}`: {FORMULAS[name]}" for name in ("al.pooled", "speedup.decode")),
        "Intervals are 95 %, by bootstrap over prompts; of 16 prompts a suite they are likely too narrow.",
        sep="\n\n",
    )


if __name__ == "__main__":
    main(sys.argv[1])
