# For type checkers: at run time these names are imported when they are first used.
from dflash_bench.api import CheckResult as CheckResult
from dflash_bench.api import Compared as Compared
from dflash_bench.api import Engine as Engine
from dflash_bench.api import Recommended as Recommended
from dflash_bench.api import Reply as Reply
from dflash_bench.api import ReplyStream as ReplyStream
from dflash_bench.api import Run as Run
from dflash_bench.api import UserError as UserError
from dflash_bench.api import check as check
from dflash_bench.api import compare as compare
from dflash_bench.api import crosscheck as crosscheck
from dflash_bench.api import doctor as doctor
from dflash_bench.api import inspect as inspect
from dflash_bench.api import load as load
from dflash_bench.api import profile as profile
from dflash_bench.api import recommend as recommend
from dflash_bench.api import run as run
from dflash_bench.api import train as train

__version__: str
