"""The program of `scripts/study`."""

import sys

from studies import _study

if __name__ == "__main__":
    sys.exit(_study.main(sys.argv[1:]))
