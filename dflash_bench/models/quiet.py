"""Keeps transformers from drawing bars and giving advice."""

from __future__ import annotations

import logging


def silence_transformers() -> None:
    """Disable progress bars and advice of transformers, which would break our progress display; errors still raise.

    It imports torchao if installed, which warns about kernels for other machines.
    """
    for name in ("accelerate", "torchao", "torch.utils._pytree", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils import logging as its_own

    its_own.disable_progress_bar()
    its_own.set_verbosity_error()
