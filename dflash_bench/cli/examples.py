"""Examples below the help of each command; a test parses them all."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "run": (
        "dflash-bench run --suite math --method dflash,eagle3",
        "dflash-bench run --prompts mine.jsonl --target ./target --draft dflash=./draft",
        "dflash-bench run --suite gsm8k --server plain=http://localhost:8000 --server dflash=http://localhost:8001",
    ),
    "sweep": (
        "dflash-bench sweep --suite gsm8k --over block=4,8,16",
        "dflash-bench sweep --suite gsm8k --over temperature=0,0.6,1",
    ),
    "demo": (
        "dflash-bench demo",
        "dflash-bench demo 'What is 17 times 23?' --model smollm2 --method eagle3",
    ),
    "suites": ("dflash-bench suites",),
    "methods": ("dflash-bench methods", "dflash-bench methods dflash"),
    "doctor": ("dflash-bench doctor --draft dflash=./draft --suite gsm8k --limit 8",),
    "crosscheck": ("dflash-bench crosscheck --model qwen3-8b --server dflash=http://localhost:8000 --suite gsm8k",),
    "conform": (
        "dflash-bench conform",
        "dflash-bench conform zlab-dflash2 --server http://localhost:8000",
    ),
    "profile": (
        "dflash-bench profile --method dflash,eagle3",
        "dflash-bench profile --model qwen3-8b --random-weights --layers 2",
    ),
    "verify-distribution": ("dflash-bench verify-distribution --method dflash:rule=rejection",),
    "models": ("dflash-bench models", "dflash-bench models --kind dflash2"),
    "fetch": ("dflash-bench fetch smollm2",),
    "inspect": ("dflash-bench inspect ./draft --target nano",),
    "convert": (
        "dflash-bench convert ./draft ./converted --to zlab",
        "dflash-bench convert ./target target.gguf --to gguf",
    ),
    "build-datastore": ("dflash-bench build-datastore --model nano --out texts.store --data texts",),
    "train": ("dflash-bench train --target nano --out mine --invented 400",),
    "runs": ("dflash-bench runs",),
    "index": ("dflash-bench index results/runs -o site",),
    "open": ("dflash-bench open", "dflash-bench open @2"),
    "compare": (
        "dflash-bench compare                    # the methods of the newest run",
        "dflash-bench compare @2 @1              # the run before, and the newest",
        "dflash-bench compare results/example --by category",
        "dflash-bench compare @2 @1 --html changes.html",
    ),
    "baseline": ("dflash-bench baseline @1 @2 @3 -o base.json",),
    "check": (
        "dflash-bench check out --baseline base.json",
        "dflash-bench check out --baseline base.json --summary $GITHUB_STEP_SUMMARY --junit check.xml",
    ),
    "report": (
        "dflash-bench report --full",
        "dflash-bench report @2 --html page.html",
        "dflash-bench report --format latex --layout paper",
    ),
    "replay": (
        "dflash-bench replay @1 --n 3,5,7",
        "dflash-bench replay @1 --method dflash --cut 0.5,0.8 --controller mine.py",
    ),
    "card": ("dflash-bench card", "dflash-bench card --hub my-draft"),
    "movie": ("dflash-bench movie -o movie.svg", "dflash-bench movie @2 --method eagle3 --answer gsm8k/0"),
    "plot": (
        "dflash-bench plot --format svg -o plots",
        "dflash-bench plot --format pdf --paper column",
    ),
}
