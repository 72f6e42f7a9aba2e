"""Shakespeare by characters, in two Englishes."""

import numpy as np

from data import sources
from data.batches import Arrays, Splits

FILES = {
    "modern_shakespeare": "text/modern_shakespeare.txt",
    "tiny_shakespeare": "text/tinyshakespeare.txt",
}


def shakespeare(name: str = "modern_shakespeare", context: int = 256) -> Splits:
    """Characters in pieces of `context`, and what follows each: 90 % to train, 5 % and 5 %.

    Args:
        name: "modern_shakespeare" is that of the paper, which has no public loader;
            "tiny_shakespeare" is the one of 1623.
        context: characters of a piece; at least 1, and short enough for one piece in each part.
    """
    if name not in FILES:
        raise ValueError(f"`shakespeare(name=...)` must be one of {[*FILES]}, got {name!r}.")
    characters, tokens = np.unique(list(_read(name)), return_inverse=True)
    parts = np.split(tokens.astype(np.int32), [int(0.9 * len(tokens)), int(0.95 * len(tokens))])
    longest = min(len(part) for part in parts) - 1
    if not 1 <= context <= longest:
        raise ValueError(
            f"`shakespeare(context=...)` must be from 1 to {longest} for this text, got {context}."
        )
    train, valid, test = (_pieces(part, context) for part in parts)
    return Splits(train, valid, test, list(characters))


def _read(name: str) -> str:
    if paths := sources.files(FILES[name]):
        return paths[0].read_text(encoding="utf-8")
    if name == "modern_shakespeare":
        remedy = 'it has no public loader; "tiny_shakespeare" has one.'
        raise sources.missing(name, FILES[name], remedy)
    parts = ("train", "validation", "test")
    texts = [
        text
        for part in parts
        for text in sources.prepared(name, FILES[name], part, lambda example: example["text"])
    ]
    return "".join(x.decode("utf-8") if isinstance(x, bytes) else x for x in texts)


def _pieces(tokens: np.ndarray, context: int) -> Arrays:
    end = (len(tokens) - 1) // context * context
    return tokens[:end].reshape(-1, context), tokens[1 : end + 1].reshape(-1, context)
