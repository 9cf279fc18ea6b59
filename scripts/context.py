"""The page of `scripts/context`. Usage: python scripts/context.py RUNS RESULTS [REMARK]

REMARK is a sentence on the machine, such as what else it was doing.
"""

import re
import shutil
import sys
from pathlib import Path

from dflash_bench import environment
from dflash_bench.analysis.metrics import FORMULAS
from dflash_bench.report import columns, contexts, document, words
from dflash_bench.report.document import Document
from dflash_bench.report.tables import markdown

NAME = "context-smollm2-cpu"
HEAD = """# What a longer context does to drafts

```
scripts/context FOLDER
```

{machine}.
{remark}

Each prompt stands behind as many other prompts of its source, with their answers, as fill the context: a longer one
only adds to a shorter one, at its beginning. The same prompts are asked at every context, greedily, in float32 on one
thread, and each answer is held against plain decoding token for token.
"""
RUN = """## {model}: {num} prompts of {suite}

```
{command}
```

{exact} of {compared} answers equal plain decoding's, token for token, and of all {audited} answers {audit} are the
published model's own choice at every token.
{about}

{table}

Memory, as predicted before loading: {memory}.

![by context]({picture})
"""
ABOUT = {
    "smollm2": "With so few prompts the intervals are wide: what they show is the direction, and what a step costs.",
    "nano": "`nano` and its drafts were trained on prompts alone: a prompt behind others is new to all of them.",
}


def main(runs: str, results: str, remark: str = "") -> None:
    out = Path(results)
    names = ("smollm2", "nano")
    parts = []
    read = {name: document.read_document(Path(runs) / name) for name in names}
    for name, run in read.items():
        picture = f"{NAME}-{name}.svg"
        shutil.copy(Path(runs) / name / "plots" / "context.svg", out / picture)
        parts.append(section(name, run, picture))
    info = read[names[0]].results.info
    machine = environment.one_line(info["environment"])
    figures = ("al.pooled", "break_even_al", "speedup.decode")
    formulas = "\n".join(f"- `{figure}`: {FORMULAS[figure]}" for figure in figures)
    text = "\n".join([HEAD.format(machine=machine, remark=remark), *parts])
    notes = "\n\n".join(columns.notes([cell for run in read.values() for cell in run.cells]))
    foot = f"{contexts.LEGEND[0].upper()}{contexts.LEGEND[1:]}.\n\n{formulas}\n\n{notes}\n"
    (out / f"{NAME}.md").write_text(f"{text}\n{foot}", encoding="utf-8")
    print(out / f"{NAME}.md")


def section(name: str, run: Document, picture: str) -> str:
    drafting = [cell.exact for cell in run.cells if cell.exact and cell.method != "ar"]
    audits = [cell.audit for cell in run.cells if cell.audit]
    info = run.results.info
    folder = Path(info["options"]["data"] or "").parent
    command = re.sub(r" --out \S+", "", info["command"]).replace(f"{folder}/", "")
    return RUN.format(
        model=name, num=run.cells[0].num_prompts, suite=run.cells[0].label, command=command,
        exact=sum(right for right, _ in drafting), compared=sum(of for _, of in drafting),
        audit=sum(right for right, _ in audits), audited=sum(of for _, of in audits), about=ABOUT[name],
        table=markdown(*contexts.table(run.cells)), memory=words.memory(info), picture=picture,
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
