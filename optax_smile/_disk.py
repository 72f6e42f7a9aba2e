"""Files of a run: written atomically, with checksums of their content."""

import contextlib
import json
import os
import re
import stat
import types
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from optax_smile import _check

# Bytes read at a time to compute the checksum of a file.
PIECE = 1 << 20
# Bytes of the largest JSON file that is read.
LARGEST_JSON = 1 << 28
# Temporary files of killed runs.
_DRAFT = re.compile(r"\.(draw-|start\.|manifest\.|prediction-).*(safetensors|json)\.[0-9]+")
# What a JSON file or header contains.
Json: TypeAlias = dict[str, Any]


def write(path: Path, content: bytes):
    """Write a file atomically: it is either complete or absent, even after a power failure."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # Not through a link of this name.
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
        raise OSError(
            error.errno,
            f"{error.strerror}: could not write this file. Earlier draws are safe and can be"
            " loaded. Make the directory writable, free disk space or choose another place",
            str(path),
        ) from error


def remove_drafts(directory: Path):
    """Remove temporary files that killed runs left behind."""
    for draft in directory.glob(".*"):
        if _DRAFT.fullmatch(draft.name):
            draft.unlink(missing_ok=True)


def open_file(path: Path, flags: int = os.O_RDONLY) -> BinaryIO:
    """Open a regular file, never a link, pipe or device that may stand in its place.

    Raises:
        OSError: another kind of file; the message does not name it.
    """
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
    """Read a JSON file, and whether its content matches the checksum in it.

    Raises:
        ValueError: not an object of JSON, or not a regular file.
    """
    try:
        with open_file(path) as file:
            if os.fstat(file.fileno()).st_size > LARGEST_JSON:
                raise ValueError(f"it has more than {LARGEST_JSON} bytes")
            text = file.read(LARGEST_JSON)
        content = json.loads(text)
        stored = content.pop("checksum", None)
    except (ValueError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return content, stored == checksum(json.dumps(content, sort_keys=True))


def checksum(content: bytes | str | np.ndarray) -> str:
    """Compute the CRC-32 of bytes, text or an array."""
    if isinstance(content, str):
        content = content.encode()
    if isinstance(content, np.ndarray):
        return f"{zlib.crc32(np.ascontiguousarray(content).reshape(-1).view(np.uint8).data):08x}"
    return f"{zlib.crc32(content):08x}"


def sums(folder: Path, skip: str) -> dict[str, list[int | str]]:
    """Return size and checksum of every file under a folder, except `skip`, by relative path."""
    sizes_and_checksums: dict[str, list[int | str]] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name != skip and not path.is_dir():
            sizes_and_checksums[name] = [path.stat().st_size, _checksum_of_file(path)]
    return sizes_and_checksums


def _checksum_of_file(path: Path) -> str:
    value = 0
    with open_file(path) as file:
        while piece := file.read(PIECE):
            value = zlib.crc32(piece, value)
    return f"{value:08x}"


def import_safetensors() -> types.ModuleType:
    """Import safetensors, or raise an error that says how to install it."""
    with _check.needed("Draws on disk need safetensors", "storage"):
        import safetensors.numpy
    return safetensors


def pack(header: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Serialize arrays and a JSON header to the bytes of a safetensors file with checksums."""
    # safetensors writes raw memory, so arrays must be C-contiguous.
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    described = {x: [str(a.dtype), list(a.shape), checksum(a)] for x, a in arrays.items()}
    text = json.dumps({**header, "arrays": described})
    metadata = {"optax_smile": text, "checksum": checksum(text)}
    return import_safetensors().numpy.save(arrays, metadata=metadata)


def read_header(file: Path) -> Json:
    """Read the header that was given to `pack`, with descriptions of the arrays as `arrays`.

    Raises:
        ValueError: a damaged file; the message does not name the file.
    """
    with open_file(file), import_safetensors().safe_open(file, framework="numpy") as content:
        return _header(content.metadata())


def read(file: Path) -> tuple[Json, dict[str, np.ndarray]]:
    """Read header, like `read_header`, and arrays, and check everything that is read."""
    with open_file(file), import_safetensors().safe_open(file, framework="numpy") as content:
        header = _header(content.metadata())
        if set(content.keys()) != set(header["arrays"]):
            raise ValueError("its arrays are not those in its header")
        arrays = {}
        for name, (dtype, shape, sum_of_array) in header["arrays"].items():
            if list(content.get_slice(name).get_shape()) != shape:
                raise ValueError(f"the shape of its array {name!r} differs from its header")
            arrays[name] = array = content.get_tensor(name)
            if (str(array.dtype), checksum(array)) != (dtype, sum_of_array):
                raise ValueError(f"the checksum of its array {name!r} does not match its content")
    return header, arrays


def _header(metadata: Mapping[str, str] | None) -> Json:
    metadata = metadata or {}
    if checksum(metadata.get("optax_smile", "")) != metadata.get("checksum"):
        raise ValueError("its checksum does not match its header")
    return json.loads(metadata["optax_smile"])


@contextlib.contextmanager
def naming(
    file: Path,
    what: str = "snapshot",
    remedy: str = "Restore it: the other draws stay readable.",
) -> Iterator[None]:
    """Re-raise read errors as a ValueError that names the file."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"The {what} {file} is damaged ({error}). {remedy}") from error
