"""`python -m dflash_bench`: the command line, where no script of that name is on the path."""

from dflash_bench.cli import main

if __name__ == "__main__":
    main()
