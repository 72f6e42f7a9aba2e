"""Files of a run: written atomically, with checksums of their content."""

import contextlib
import json
import os
import stat
import types
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from optax_smile import _check

Json: TypeAlias = dict[str, Any]  # What a JSON file or header contains.
RESTORE = "Restore it: the other draws stay readable."


def write(path: Path, content: bytes):
    """Write a file atomically: it is either complete or absent, even after a power failure."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # Do not follow a link of this name.
        draft.unlink(missing_ok=True)
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        advice = "Earlier draws are safe. Make room and the directory writable, or choose another"
        message = f"{error.strerror}: could not write this file. {advice}"
        raise OSError(error.errno, message, str(path)) from error


def open_file(path: Path, flags: int = os.O_RDONLY) -> BinaryIO:
    """Open a regular file; raise OSError if the path is a link, a pipe or a device."""
    # Windows has neither flag.
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    if path.is_symlink():
        raise OSError("it is a symbolic link")
    file = os.fdopen(os.open(path, flags, 0o666), "rb" if flags & os.O_RDWR == 0 else "r+b")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is not a regular file")
    return file


def write_json(path: Path, content: Json):
    """Write JSON with its checksum, atomically."""
    content = {**content, "checksum": checksum(json.dumps(content, sort_keys=True))}
    write(path, json.dumps(content, indent=1).encode())


def read_json(path: Path) -> tuple[Json, bool]:
    """Read a JSON object, and whether it matches its checksum; ValueError for anything else."""
    try:
        with open_file(path) as file:
            content = json.load(file)
        stored = content.pop("checksum", None)
    except (ValueError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return content, stored == checksum(json.dumps(content, sort_keys=True))


def checksum(content: bytes | str) -> str:
    """Compute the CRC-32 of bytes or text, eight digits."""
    content = content.encode() if isinstance(content, str) else content
    return f"{zlib.crc32(content):08x}"


def import_safetensors() -> types.ModuleType:
    """Import safetensors, or raise an error that says how to install it."""
    with _check.needed("Draws on disk need safetensors", "storage"):
        import safetensors.numpy
    return safetensors


def pack(header: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Serialize arrays and a JSON header, each with its checksum, to a safetensors file.

    If the header contains the name of the `file`, `read` rejects the file under another name.
    """
    # safetensors writes raw memory, so arrays must be C-contiguous.
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    text = json.dumps({**header, "arrays": _sum_of(arrays)})
    metadata = {"optax_smile": text, "checksum": checksum(text)}
    return import_safetensors().numpy.save(arrays, metadata=metadata)


def read(file: Path, only_header: bool = False) -> tuple[Json, dict[str, np.ndarray]]:
    """Read what `pack` has written; a damaged file raises a ValueError without its name."""
    with open_file(file), import_safetensors().safe_open(file, framework="numpy") as content:
        metadata = content.metadata() or {}
        text = metadata.get("optax_smile", "")
        if checksum(text) != metadata.get("checksum"):
            raise ValueError("its checksum does not match its header")
        header = json.loads(text)
        if header.get("file", file.name) != file.name:
            raise ValueError(f"it is {header['file']}")
        if only_header:
            return header, {}
        arrays = {name: content.get_tensor(name) for name in content.keys()}
    if _sum_of(arrays) != header["arrays"]:
        raise ValueError("the checksum of its arrays does not match them")
    return header, arrays


def _sum_of(arrays: Mapping[str, np.ndarray]) -> str:
    """Compute the checksum of arrays with their names, dtypes and shapes."""
    value = 0
    for name, array in sorted(arrays.items()):
        value = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), value)
        value = zlib.crc32(array.reshape(-1).view(np.uint8).data, value)
    return f"{value:08x}"


@contextlib.contextmanager
def naming(file: Path, what: str = "snapshot", remedy: str = RESTORE) -> Iterator[None]:
    """Re-raise read errors as a ValueError that names the file."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"The {what} {file} is damaged ({error}). {remedy}") from error
