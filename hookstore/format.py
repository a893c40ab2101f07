"""The format of a run on disk: the one place where its names, numbers and rules are written down.

Everything here is pure: no file is touched and no heavy package is imported. ``tools/readme.py`` prints these facts into the README.

References
----------
Zarr v3 core and ``sharding_indexed``: https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

FORMAT_VERSION = 1

RUN_FILE = "run.json"
LAYERS_DIR = "layers"
MANIFEST_DIR = "manifest"
JOURNAL_DIR = "journal"
LOCK_FILE = "lock.json"  # in journal/
DAMAGED_DIR = "damaged"  # what recovery found broken and put aside
MAKING_PREFIX = ".making-"  # directories in the run that are about to become groups and arrays
WRITING_SUFFIX = ".writing"  # files that are about to take the place of others; their names begin with a dot

KINDS = ("activation", "gradient", "input", "input_gradient", "parameter", "parameter_gradient")
SCALED_KINDS = ("gradient", "input_gradient")  # what a GradScaler multiplies; the optimizer sees parameters' gradients without
OF_BATCH = ("annotation", "loss")  # kinds of what belongs to a batch and to no layer; filed under the root's name
PHASES = ("train", "eval")
LARGEST_COORDINATE = 2**40  # epochs and batches: what every Zarr reader takes as an extent

# Shards -----------------------------------------------------------------------------------------------------------

PAGE_BYTES = 4096  # O_DIRECT wants addresses, offsets and lengths in multiples of this
CHUNK_ALIGNMENT_BYTES = 64
CRC_BYTES = 4
SHARD_TARGET_BYTES = 256 << 20
MAX_SHARD_ENTRIES = 65_536
CALLS_PER_SHARD = 16
EPOCHS_PER_SHARD = 64  # at most, where the run's length is not known
MISSING = 2**64 - 1  # offset and length of a chunk that a shard does not hold
TRAILER_MAGIC = b"HKSTROWS"
TRAILER_FORMAT = "<8sQQI4x"  # magic, offset, length and crc32c of the manifest rows; stands right before the index
TRAILER_BYTES = 32

# Journal and manifest ---------------------------------------------------------------------------------------------

FRAME_FORMAT = "<III"  # payload length, kind, crc32c over the first two and the payload
FRAME_BYTES = 12
FRAME_SCHEMA, FRAME_ROWS, FRAME_SYNC = 1, 2, 3
SYNC_FORMAT = "<Q"  # rows of this segment, counted from its start, that are durable
SEGMENT_ROWS = 65_536
SEGMENT_BYTES = 128 << 20  # rows may have long texts, and readers take no texts of more than four times as much


class Row(NamedTuple):
    """One row of the manifest: one captured tensor, or one gap with its reason."""

    phase: str
    epoch: int
    batch: int
    call: int
    backward: int
    step: int
    layer: str
    kind: str
    leaf: str
    rank: int
    attempt: int
    array: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    wall_time: int
    loss_scale: float | None
    shard: str
    offset: int
    length: int
    crc32c: int
    status: str
    reason: str
    structure: str = ""
    portion: str = ""
    whole_shape: str = ""
    statistics: Any = None


# Column, Arrow type, meaning. The order is that of Row.
MANIFEST_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("phase", "string", "`train` or `eval`: the mode of the root module in the forward"),
    ("epoch", "int64", "epoch of the forward"),
    ("batch", "int64", "batch of the forward within its epoch"),
    (
        "call",
        "int64",
        "which call of the layer within that batch: 0, 1, …; of a `parameter_gradient` which step of that parameter's optimizer there",
    ),
    ("backward", "int32", "which backward over that forward: 0, 1, …"),
    ("step", "int64", "optimizer steps done before the forward; of a `parameter_gradient` before the step that it was used for"),
    ("layer", "string", "qualified name from `named_modules()`; the root module is the empty string"),
    (
        "kind",
        "string",
        "`activation`, `gradient`, `input`, `input_gradient`, `parameter` or `parameter_gradient`; `annotation` or `loss` of a batch; empty in a row that "
        "stands for a whole batch",
    ),
    ("leaf", "string", "path inside a nested value, or the parameter's name; empty for a plain tensor"),
    ("rank", "int32", "rank of the recording process"),
    ("attempt", "int32", "which recording of the run: 0, and one more each time that it was taken up again"),
    ("array", "string", "path of the Zarr array below `layers/`; empty where the row has no bytes"),
    ("shape", "list<int64>", "true shape, without padding"),
    ("dtype", "string", "torch dtype of what is stored"),
    ("nbytes", "int64", "bytes of the tensor itself, without padding and before encoding"),
    ("wall_time", "timestamp[us, UTC]", "when the capture was staged"),
    (
        "loss_scale",
        "float64",
        "scale of a GradScaler that the stored gradient carries, and that reading divides by; null where there is none",
    ),
    ("shard", "string", "Zarr key of the shard"),
    ("offset", "int64", "first byte of the chunk in the shard"),
    ("length", "int64", "bytes of the chunk in the shard, its crc32c included"),
    ("crc32c", "uint32", "checksum of the chunk's encoded bytes"),
    (
        "status",
        "string",
        "`ok`, `summarized` (statistics alone), `dropped` (no room), `skipped` (not a tensor to store, or no time for the batch) or `lost` (in a power "
        "failure); for a whole batch also `partial` (cut short), `stopped` (recording ended there, for `max_bytes`) and `fired` (a trigger of the flight "
        "recorder)",
    ),
    ("reason", "string", "why the status is not `ok`"),
    (
        "structure",
        "string",
        "how the value is built of which this tensor is a leaf, as JSON; empty for a plain tensor. Runs made before this column was there have none",
    ),
)

SUMMARIZED = "only its statistics are stored"  # reason of the rows with status "summarized"

# Columns that only runs have in which something of that kind was asked for; in other runs' files they are not there at all.
PORTION_COLUMN = (
    "portion",
    "string",
    "which part of the tensor was kept by `select`, such as `sample[:8], token[[-1]]` or `module.function()`; empty for all of it",
)
WHOLE_SHAPE_COLUMN = ("whole_shape", "string", "shape of the tensor of which that part was kept, such as `64,16,3`; empty where all was")
STATISTICS_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("mean", "float64", "mean of the finite values (of a complex tensor: of their moduli, here and below); null where there are none"),
    ("std", "float64", "their standard deviation, of the population (`ddof=0`)"),
    ("min", "float64", "the smallest of them"),
    ("max", "float64", "the largest of them"),
    ("absmax", "float64", "their largest absolute value"),
    ("l2", "float64", "their L2 norm: the square root of the sum of squares"),
    ("zeros", "float64", "share of zeros among all elements; null for an empty tensor"),
    ("nan", "int64", "how many elements are NaN; null where no statistics were asked for"),
    ("inf", "int64", "how many elements are infinite"),
)

STORED = ("ok", "summarized")  # statuses of rows that have a tensor, or statistics
STATUSES = ("ok", "summarized", "dropped", "skipped", "lost", "partial", "stopped", "fired")

_SEGMENT_PATTERN = re.compile(r"r(\d+)-a(\d+)-(\d+)\.journal")
_PART_PATTERN = re.compile(r"r(\d+)-a(\d+)-(\d+)-([0-9a-f]{8})\.parquet")
_SHARD_PATTERN = re.compile(r"c(\.(0|[1-9]\d*))+")


def segment_name(rank: int, attempt: int, index: int) -> str:
    """Return the file name of a journal segment."""
    return f"r{rank}-a{attempt}-{index:06d}.journal"


def part_name(rank: int, attempt: int, index: int, crc: int) -> str:
    """Return the file name of the Parquet part made of that segment; it carries the crc32c of the file's bytes."""
    return f"r{rank}-a{attempt}-{index:06d}-{crc:08x}.parquet"


def parse_segment_name(name: str) -> tuple[int, int, int] | None:
    """Return (rank, attempt, index) of a journal segment, or ``None`` for another file."""
    match = _SEGMENT_PATTERN.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


def parse_part_name(name: str) -> tuple[tuple[int, int, int], int] | None:
    """Return ((rank, attempt, index), crc32c) of a Parquet part, or ``None`` for another file."""
    match = _PART_PATTERN.fullmatch(name)
    return None if match is None else ((int(match[1]), int(match[2]), int(match[3])), int(match[4], 16))


def is_shard_key(text: str) -> bool:
    """Say whether ``text`` is a shard's key, and so safe to use as a file name."""
    return _SHARD_PATTERN.fullmatch(text) is not None


def parse_shard_key(key: str, num_dims: int) -> tuple[int, ...]:
    """Return the coordinates in a shard's key along the first dimensions; the others are 0."""
    return tuple(int(number) for number in key.split(".")[1 : 1 + num_dims])


def is_array_path(text: str) -> bool:
    """Say whether ``text`` can be the path of an array below ``layers/``, and so is safe to use as a path."""
    parts = text.split("/")
    return len(parts) == 2 and not any(
        part in ("", ".", "..") or "\\" in part or "\0" in part or len(part) > COMPONENT_BYTES for part in parts
    )


def unsealed_name(shard: str) -> str:
    """Return the hidden file name that a shard has until it is sealed."""
    return f".{shard}.unsealed"


def parse_unsealed_name(name: str) -> str | None:
    """Return the key of the shard that has this hidden name, or ``None`` for another file."""
    key = name[1:].removesuffix(".unsealed")
    return key if name == unsealed_name(key) and is_shard_key(key) else None


def cloning_name(shard: str) -> str:
    """Return the hidden name of the clone of a sealed shard until all of it is there."""
    return f".{shard}.cloning"


# Data types -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DType:
    """How one torch dtype is stored.

    Attributes
    ----------
    name : str
        The torch dtype without its ``torch.``.
    zarr : str
        Zarr data type of the array. Where it is an unsigned integer of the same width for a torch dtype that is none, the bits are stored.
    numpy : str or None
        Name of the NumPy (or ml_dtypes) type that reading gives, ``None`` where there is none.
    itemsize : int
        Bytes of one element.
    fill_value : float, bool, str or list
        As it stands in the array's metadata.
    fill_bits : int
        The same as the bits of one element.
    """

    name: str
    zarr: str
    numpy: str | None
    itemsize: int
    fill_value: float | bool | str | tuple[float, float]
    fill_bits: int


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("bool", "bool", "bool", 1, False, 0),  # noqa: FBT003
        DType("uint8", "uint8", "uint8", 1, 0, 0),
        DType("uint16", "uint16", "uint16", 2, 0, 0),
        DType("uint32", "uint32", "uint32", 4, 0, 0),
        DType("uint64", "uint64", "uint64", 8, 0, 0),
        DType("int8", "int8", "int8", 1, 0, 0),
        DType("int16", "int16", "int16", 2, 0, 0),
        DType("int32", "int32", "int32", 4, 0, 0),
        DType("int64", "int64", "int64", 8, 0, 0),
        DType("float16", "float16", "float16", 2, "NaN", 0x7E00),
        DType("bfloat16", "bfloat16", "bfloat16", 2, "NaN", 0x7FC0),
        DType("float32", "float32", "float32", 4, "NaN", 0x7FC0_0000),
        DType("float64", "float64", "float64", 8, "NaN", 0x7FF8_0000_0000_0000),
        DType("float8_e5m2", "float8_e5m2", "float8_e5m2", 1, "0x7e", 0x7E),
        DType("float8_e4m3fn", "uint8", "float8_e4m3fn", 1, 0, 0),
        DType("float8_e4m3fnuz", "uint8", "float8_e4m3fnuz", 1, 0, 0),
        DType("float8_e5m2fnuz", "uint8", "float8_e5m2fnuz", 1, 0, 0),
        DType("float8_e8m0fnu", "uint8", "float8_e8m0fnu", 1, 0, 0),
        DType("complex32", "uint32", None, 4, 0, 0),
        DType("complex64", "complex64", "complex64", 8, (0.0, 0.0), 0),
        DType("complex128", "complex128", "complex128", 16, (0.0, 0.0), 0),
    )
}

# Names ------------------------------------------------------------------------------------------------------------

COMPONENT_BYTES = 255
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyz0123456789._-+=,@~#")
_ROOT = "%root"  # no escape starts with "%r", so that no other name comes out as this one
_WINDOWS_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?")
_RESERVED_LEAF = re.compile(r"eval|calls|scalar|s\d+(x\d+)*|rank\d+")


def escape(name: str) -> str:
    """Turn a layer's name, or an array's, into one path component that no other name has.

    Lower-case letters, digits and ``._-+=,@~#`` stand for themselves, ``^x`` for the capital X (so that names which differ in case alone stay apart
    on file systems that ignore it), ``%hh`` for any other byte of the UTF-8 form. Characters that would make the component hidden, reserved by Zarr
    (``__``, ``zarr.json``) or reserved by Windows are written as ``%hh`` too. The empty name is ``%root``. What comes out longer than 255 bytes is cut
    and ends in a hash of the whole name instead; the array's attributes hold the true one.
    """
    if name == "":
        return _ROOT
    text = "".join(_escape_character(character) for character in name)
    if text[0] == "." or text.startswith("__") or text == "zarr.json" or _WINDOWS_DEVICE.fullmatch(text):
        text = f"%{ord(text[0]):02x}{text[1:]}"
    if text[-1] == ".":
        text = f"{text[:-1]}%2e"
    if len(text) > COMPONENT_BYTES:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        text = f"{text[: COMPONENT_BYTES - 34]}%~{digest}"
    return text


def _escape_character(character: str) -> str:
    if character in _PLAIN:
        return character
    if "A" <= character <= "Z":
        return "^" + character.lower()
    return "".join(f"%{byte:02x}" for byte in character.encode("utf-8", "surrogatepass"))


def leaf_path(parts: Sequence[str | int]) -> str:
    """Join the keys and positions that lead to a tensor inside a nested value, so that no two ways to a tensor come out alike.

    A dot inside a key is written ``%2e``, half of a surrogate pair ``%uhhhh``, and a key that could be taken for a position gets a ``~`` in front.
    """
    return ".".join(map(_leaf_part, parts))


def _leaf_part(part: str | int) -> str:
    if not isinstance(part, str):
        return str(part)
    text = part.replace("%", "%25").replace(".", "%2e")
    text = "".join(f"%u{ord(character):04x}" if "\ud800" <= character <= "\udfff" else character for character in text)
    return f"~{text}" if text[:1] == "~" or text.lstrip("-").isdigit() else text


def array_name(
    kind: str,
    *,
    leaf: str = "",
    phase: str = "train",
    portion: str = "",
    dtype: str = "",
    chunk: tuple[int, ...] | None = None,
    calls: bool = False,
    rank: int = 0,
) -> str:
    """Name an array inside its layer's group.

    The plain case is the kind alone. What differs from it follows after dots, in this order: the leaf, ``eval``, the portion's token (``@…``), the dtype
    and the size class (only where the layer's first capture of that leaf and portion had another one), ``calls`` for calls from 1 on, the rank. A leaf that
    could be taken for one of these is marked with ``~``.
    """
    tokens = [kind]
    for token in leaf.split(".") if leaf else ():
        clashes = token == "" or token[0] in "~@" or token in DTYPES or _RESERVED_LEAF.fullmatch(token)
        tokens.append(f"~{token}" if clashes else token)
    if phase != "train":
        tokens.append(phase)
    if portion:
        tokens.append(portion)
    if dtype:
        tokens.append(dtype)
    if chunk is not None:
        tokens.append("s" + "x".join(map(str, chunk)) if chunk else "scalar")
    if calls:
        tokens.append("calls")
    if rank:
        tokens.append(f"rank{rank}")
    return escape(".".join(tokens))


# Chunks and shards ------------------------------------------------------------------------------------------------


def align(value: int, multiple: int) -> int:
    """Round ``value`` up to a multiple."""
    return -(-value // multiple) * multiple


def fits_chunk(shape: tuple[int, ...], chunk: tuple[int, ...]) -> bool:
    """Say whether a capture of that shape belongs into an array of that chunk shape, padded.

    The first dimension may be padded when it fills at least half of the chunk's; the others when they are of the same power-of-two class.
    """
    if len(shape) != len(chunk):
        return False
    if any(size > limit for size, limit in zip(shape, chunk, strict=True)):
        return False
    if shape and 2 * shape[0] < chunk[0]:
        return False
    return all(size == limit or _power_of_two(size) == _power_of_two(limit) for size, limit in zip(shape[1:], chunk[1:], strict=True))


def size_class(shape: tuple[int, ...], reference: tuple[int, ...]) -> tuple[int, ...]:
    """Return the chunk shape of a new array: the dimensions that differ from the reference are rounded up to powers of two."""
    if len(shape) != len(reference):
        return shape
    return tuple(size if size == usual else _power_of_two(size) for size, usual in zip(shape, reference, strict=True))


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def shard_shape(
    chunk_bytes: int, *, every: int = 1, epoch_batches: int | None = None, num_epochs: int | None = None, calls: bool = False
) -> tuple[int, ...]:
    """Choose how many epochs and batches (and calls) one shard covers.

    Parameters
    ----------
    chunk_bytes : int
        Bytes of one capture in the shard.
    every : int
        One batch in so many is recorded.
    epoch_batches, num_epochs : int or None
        Batches of an epoch and epochs of the run, where known.
    calls : bool
        Whether the array has a call dimension.

    Returns
    -------
    tuple of int
        (epochs, batches) or (epochs, batches, calls). A full shard has about 256 MiB and at most 65,536 entries; it covers several epochs only where
        whole epochs are smaller than that.
    """
    room = MAX_SHARD_ENTRIES // (CALLS_PER_SHARD if calls else 1)
    captures = max(1, SHARD_TARGET_BYTES // max(1, chunk_bytes) // (CALLS_PER_SHARD if calls else 1))
    batches = min(room, captures * every)
    epochs = 1
    if epoch_batches is not None and epoch_batches <= batches:
        batches = max(1, epoch_batches)
        captures_per_epoch = math.ceil(batches / every)
        epochs = max(1, min(room // batches, captures // captures_per_epoch, num_epochs or EPOCHS_PER_SHARD))
    return (epochs, batches, CALLS_PER_SHARD) if calls else (epochs, batches)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One Zarr array of a run.

    Attributes
    ----------
    layer, kind, phase, leaf, dtype : str
        What it holds; ``dtype`` is a key of `DTYPES`.
    name : str
        Name inside the layer's group.
    chunk_shape : tuple of int
        Shape of one capture with its padding, without the epoch, batch and call dimensions.
    shard_shape : tuple of int
        Epochs and batches (and calls) of one shard.
    rank : int
        Rank of the recording process, its only writer.
    codec : str or None
        The compressor as canonical JSON (Zarr v3 codec metadata).
    portion : str
        Text of the part of each tensor that is kept; see `hookstore.portion`.
    dims : tuple of str
        Names that the user gave to the tensor's axes, the first ones of them; empty where none.
    """

    layer: str
    kind: str
    phase: str
    leaf: str
    dtype: str
    name: str
    chunk_shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    rank: int = 0
    codec: str | None = None
    portion: str = ""
    dims: tuple[str, ...] = ()

    @property
    def calls(self) -> bool:
        """Whether the array has a call dimension."""
        return len(self.shard_shape) == 3

    @property
    def path(self) -> str:
        """Path of the array below ``layers/``."""
        return f"{escape(self.layer)}/{self.name}"

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk before encoding, without its checksum."""
        return math.prod(self.chunk_shape) * DTYPES[self.dtype].itemsize

    @property
    def stride_bytes(self) -> int:
        """Distance between two unencoded chunks in a shard."""
        return align(self.chunk_bytes + CRC_BYTES, CHUNK_ALIGNMENT_BYTES)

    @property
    def num_entries(self) -> int:
        """Entries in the index of one shard."""
        return math.prod(self.shard_shape)

    def shard_of(self, epoch: int, batch: int, call: int) -> tuple[int, ...]:
        """Return the coordinates of the shard for one capture."""
        coordinates = (epoch, batch, call) if self.calls else (epoch, batch)
        return tuple(value // size for value, size in zip(coordinates, self.shard_shape, strict=True))

    def entries(self, epochs: Any, batches: Any, calls: Any) -> Any:
        """Return the entries in a shard's index for captures of that shard; takes and gives integers or NumPy arrays of them."""
        inner = epochs % self.shard_shape[0] * self.shard_shape[1] + batches % self.shard_shape[1]
        return inner * self.shard_shape[2] + calls % self.shard_shape[2] if self.calls else inner

    def shard_ranges(self, shard: tuple[int, ...]) -> tuple[range, range, range]:
        """Return the epochs, batches and calls that belong to a shard."""
        (epoch, batch, call), (epochs, batches, calls) = (*shard, 0)[:3], (*self.shard_shape, 1)[:3]
        return (
            range(epoch * epochs, (epoch + 1) * epochs),
            range(batch * batches, (batch + 1) * batches),
            range(call * calls, (call + 1) * calls),
        )

    def shard_key(self, shard: tuple[int, ...]) -> str:
        """Return the Zarr key of a shard, which is its file name in the array's directory."""
        return ".".join(["c", *map(str, shard), *("0" for _ in self.chunk_shape)])
