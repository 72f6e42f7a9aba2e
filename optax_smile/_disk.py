"""Files of a run: whole or absent, with checksums of all that they hold, never behind a link."""

import contextlib
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Of a text that is read in one go; a manifest of a thousand leaves has 200 kB.
LARGEST_TEXT = 1 << 26
# Of a file at a time, for its checksum.
PIECE = 1 << 20


def write(path: Path, content: bytes):
    """Write a file that is either whole or absent, also after a power failure."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # A file of that name may be a link, which is not to be written through.
        draft.unlink(missing_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
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
            f"{error.strerror}: this file could not be written. The draws before it are safe and"
            " can be loaded; make room or choose another directory",
            str(path),
        ) from error


def remove_drafts(directory: Path):
    """Remove what killed runs were about to write."""
    for pattern in (".*.safetensors.*", ".*.json.*"):
        for draft in directory.glob(pattern):
            if draft.is_symlink() or draft.is_file():
                draft.unlink(missing_ok=True)


def check_own(path: Path):
    """Require a file or a folder that lies where it is named.

    Raises:
        ValueError: it is a link, which may lead anywhere, or a pipe or a device.
        OSError: there is none.
    """
    mode = path.lstat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = "a link" if stat.S_ISLNK(mode) else "no file"
        raise ValueError(
            f"{path} is {kind}: nothing outside the directory of a run is read or written."
            " Remove it, or put what it stands for there"
        )


def checksum(content: Any) -> str:
    """CRC-32 of bytes, text or an array."""
    if isinstance(content, str):
        content = content.encode()
    if isinstance(content, np.ndarray):
        content = np.ascontiguousarray(content).reshape(-1).view(np.uint8).data
    return f"{zlib.crc32(content):08x}"


def read_text(file: Path) -> str:
    """Read a file that must not be large."""
    check_own(file)
    if (size := file.stat().st_size) > LARGEST_TEXT:
        raise ValueError(f"{size:,} bytes")
    return file.read_text()


def sums(folder: Path, skip: str) -> dict[str, list[Any]]:
    """Size and checksum of every file under a folder, by its path in there, but for one."""
    found = {}
    for path in sorted(folder.rglob("*")):
        check_own(path)
        name = path.relative_to(folder).as_posix()
        if name != skip and not path.is_dir():
            found[name] = [path.stat().st_size, _checksum_of_file(path)]
    return found


def _checksum_of_file(path: Path) -> str:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            value = zlib.crc32(piece, value)
    return f"{value:08x}"


def import_safetensors() -> Any:
    """Import safetensors, or say how to get it."""
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "Draws on disk need safetensors: pip install 'optax-smile[storage]'."
        ) from error
    return safetensors


def pack(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Put arrays, and a header that JSON can hold, into a safetensors file with checksums."""
    # Of others safetensors writes the memory as it lies.
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    described = {x: [str(a.dtype), list(a.shape), checksum(a)] for x, a in arrays.items()}
    text = json.dumps({**header, "arrays": described})
    told = {"optax_smile": text, "checksum": checksum(text)}
    return import_safetensors().numpy.save(arrays, metadata=told)


def read_header(file: Path, check: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Read what `pack` was given as header, with the descriptions of the arrays as `arrays`.

    Args:
        file: that was packed.
        check: `check(header)` raises ValueError where its content is not what it has to be.

    Raises:
        ValueError: saying what is wrong, without the name of the file.
    """
    with _opened(file) as content:
        return _header(content, check)


def read(
    file: Path, check: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read header and arrays as `read_header` does; nothing is read that has not been checked."""
    with _opened(file) as content:
        header = _header(content, check)
        if set(content.keys()) != set(header["arrays"]):
            raise ValueError("it has other arrays than its header says")
        arrays = {}
        for name, (dtype, shape, sum_of_array) in header["arrays"].items():
            if list(content.get_slice(name).get_shape()) != shape:
                raise ValueError(f"its array {name!r} has another shape than its header says")
            arrays[name] = array = content.get_tensor(name)
            if (str(array.dtype), checksum(array)) != (dtype, sum_of_array):
                raise ValueError(f"the checksum of its array {name!r} does not fit its content")
    return header, arrays


def _opened(file: Path) -> Any:
    safetensors = import_safetensors()
    check_own(file)
    return safetensors.safe_open(file, framework="numpy")


def _header(content: Any, check: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    told = content.metadata() or {}
    if checksum(told.get("optax_smile", "")) != told.get("checksum"):
        raise ValueError("its checksum does not fit its header")
    header = json.loads(told["optax_smile"])
    check(header)
    return header


@contextlib.contextmanager
def naming(
    file: Path,
    what: str = "snapshot",
    remedy: str = "Remove it: the other draws stay readable.",
) -> Iterator[None]:
    """Let whatever is wrong with a file be said by a sentence that names it."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"The {what} {file} is damaged ({error}). {remedy}") from error
