"""The text of each token, from the tokenizer that made it, where that is at hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_bench import reading
from dflash_bench.errors import UserError

NANO = Path(__file__).parent.parent / "nano" / "target"
NOT_AT_HAND = "Tokens are not coloured, because the target's tokenizer was not found: give --tokenizer FOLDER."
OTHER = "Some answers are not coloured, because this tokenizer does not decode their tokens to the stored text."


def load_tokenizer(info: Mapping[str, Any], chosen: Path | None) -> Any | None:
    """Nothing is fetched. Raises UserError where `given` holds no tokenizer; None where none is at hand."""
    if chosen is not None and not any(path.is_file() for path in _places(chosen)):
        raise UserError(f"{chosen} holds no tokenizer.json")
    candidates = _places(chosen) if chosen else known(info)
    path = next((path for path in candidates if path.is_file()), None)
    return None if path is None else read_tokenizer(path)


def read_tokenizer(path: Path) -> Any:
    """Of a tokenizer.json. Raises UserError."""
    from tokenizers import Tokenizer

    text = reading.text_of(path)
    match reading.parse_json(str(path), text):
        case {"model": dict()}:
            pass
        case _:
            raise UserError(f"cannot read {path}: not a tokenizer (it holds no model)")
    try:
        return Tokenizer.from_str(text)
    except Exception as error:
        if type(error) is not Exception:  # tokenizers, which is Rust, raises nothing more exact
            raise
        raise UserError(f"cannot read {path}: not a tokenizer ({error})") from error


def _places(folder: Path) -> list[Path]:
    return [folder, folder / "tokenizer.json", folder / "target" / "tokenizer.json"]


def known(info: Mapping[str, Any]) -> Iterator[Path]:
    """Where the run says that its model is; of a model from the hub, the local cache."""
    from huggingface_hub import try_to_load_from_cache

    identity, options = info["identity"], info.get("options", {})
    if identity["model"] == "nano":
        yield NANO / "tokenizer.json"
    for name in filter(None, (options.get("target"), options.get("model"))):
        yield from _places(Path(name))
    repository = str(identity.get("target") or "").partition("@")[0]
    if repository.count("/") == 1:
        commit = str((identity.get("revisions") or {}).get("target")).rpartition("@")[2]
        cached = try_to_load_from_cache(repository, "tokenizer.json", revision=commit)
        if isinstance(cached, str):
            yield Path(cached)


def pieces(tokenizer: Any, token_ids: Sequence[int], text: str) -> list[str] | None:
    """One text a token, empty where a letter is not whole yet; None where they do not make up `text`."""
    from tokenizers.decoders import DecodeStream

    try:
        if tokenizer.decode(list(token_ids), skip_special_tokens=True) != text:
            return None
    except OverflowError:  # an id that no tokenizer has
        return None
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in token_ids]
