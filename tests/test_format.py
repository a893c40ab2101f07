"""`hookstore.format`: names, size classes, shard shapes, places in a shard."""

from __future__ import annotations

import itertools
import math
import re
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hookstore.format import (
    CALLS_PER_SHARD,
    COMPONENT_BYTES,
    DTYPES,
    KINDS,
    MANIFEST_COLUMNS,
    MAX_SHARD_ENTRIES,
    PHASES,
    PORTION_COLUMN,
    SHARD_TARGET_BYTES,
    WHOLE_SHAPE_COLUMN,
    ArraySpec,
    Row,
    align,
    array_name,
    escape,
    fits_chunk,
    is_shard_key,
    leaf_path,
    parse_part_name,
    parse_segment_name,
    part_name,
    segment_name,
    shard_shape,
    size_class,
    unsealed_name,
)

SAFE = re.compile(r"[a-z0-9._\-+=,@~#%^]+")
WINDOWS_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)

any_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=40)  # lone surrogates too
tricky_text = st.lists(
    st.sampled_from(
        [
            ".",
            "_",
            "%",
            "%2e",
            "%root",
            "^",
            "~",
            "a",
            "A",
            "con",
            "CON",
            "nul",
            "zarr.json",
            "/",
            "\\",
            "\0",
            " ",
            "é",
            "e\u0301",
            "\udc80",
            "x" * 90,
        ]
    ),
    max_size=6,
).map("".join)
names = st.one_of(any_text, tricky_text)


def is_safe_component(component: str) -> bool:
    return (
        SAFE.fullmatch(component) is not None
        and len(component.encode()) <= COMPONENT_BYTES
        and component[0] != "."
        and component[-1] != "."
        and not component.startswith("__")
        and component != "zarr.json"
        and not WINDOWS_DEVICE.fullmatch(component)
    )


# The escape ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "conv1",
        "fc1",
        "layer4.1.conv2",
        "encoder.layers.11.self_attn",
        "a_b-c+d=e,f@g~h#i",
        "0",
        "features.0",
        "_private",
        "x" * 255,
        "conv",
        "com",
        "c.0",
    ],
)
def test_ordinary_lower_case_names_stand_for_themselves(name: str) -> None:
    assert escape(name) == name


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("", "%root"),
        (".", "%2e"),
        ("..", "%2e%2e"),
        ("...", "%2e.%2e"),
        (".hidden", "%2ehidden"),
        ("ends.", "ends%2e"),
        ("__x", "%5f_x"),
        ("__init__", "%5f_init__"),
        ("zarr.json", "%7aarr.json"),
        ("a/b", "a%2fb"),
        ("a\\b", "a%5cb"),
        ("a b", "a%20b"),
        ("a:b", "a%3ab"),
        ("100%", "100%25"),
        ("a^b", "a%5eb"),
        ("%root", "%25root"),
        ("\0", "%00"),
        ("a\nb\x1f\x7f", "a%0ab%1f%7f"),
        ("Linear", "^linear"),
        ("ReLU", "^re^l^u"),
        ("é", "%c3%a9"),
        ("e\u0301", "e%cc%81"),
        ("層", "%e5%b1%a4"),
        ("🙂", "%f0%9f%99%82"),
        ("\udc80", "%ed%b2%80"),
        ("con", "%63on"),
        ("aux.1", "%61ux.1"),
        ("com1", "%63om1"),
        ("lpt9.weight", "%6cpt9.weight"),
        ("console", "console"),
        ("CON", "^c^o^n"),
    ],
)
def test_escape_of_awkward_names(name: str, component: str) -> None:
    assert escape(name) == component
    assert is_safe_component(component)


@pytest.mark.parametrize(
    "names_together",
    [
        ["fc", "Fc", "fC", "FC", "^fc", "^f^c"],
        [unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é"), "É", "E\u0301"],
        ["", "%root", "root", "^root", "Root", "%25root"],
        [".", "%2e", "..", "%2e%2e", "%2E"],
        ["con", "%63on", "CON", "con."],
        ["a/b", "a%2fb", "a%2Fb", "a\\b", "a.b", "a_b"],
        ["\udc80", "\udc81", "\ufffd", "\x80"],
        ["ß", "ẞ", "ss", "SS"],
        ["ſ", "s", "S"],
        ["\u212a", "k", "K"],
        ["İ", "i\u0307", "i", "I", "ı"],
    ],
)
def test_twins_stay_apart_on_every_file_system(names_together: list[str]) -> None:
    components = [escape(name) for name in names_together]
    assert len({unicodedata.normalize("NFC", component).casefold() for component in components}) == len(names_together)


@pytest.mark.parametrize(
    "name", ["x" * 256, "X" * 128, "/" * 86, "層" * 29, "." + "x" * 253, "con." + "x" * 250, "x" * 254 + ".", "__" + "x" * 252]
)
def test_longer_names_end_in_a_hash(name: str) -> None:
    component = escape(name)
    assert is_safe_component(component)
    assert len(component) == COMPONENT_BYTES
    assert re.fullmatch(r"%~[0-9a-f]{32}", component[-34:])
    others = [escape(name + "x"), escape("y" + name), escape(name.swapcase())]
    assert len({component, *others}) == len({name, name + "x", "y" + name, name.swapcase()})


def test_a_name_cannot_pretend_to_be_a_hash() -> None:
    long_one = "x" * 400
    assert escape(escape(long_one)) != escape(long_one)
    assert escape("x" * 221 + "%~" + "0" * 32) != "x" * 221 + "%~" + "0" * 32


@given(names, names)
@example("e\u0301", "é")
@example("K", "\u212a")
@example("x" * 300, "X" + "x" * 299)
@example("con", "%63on")
@settings(max_examples=400, deadline=None)
def test_distinct_names_give_distinct_safe_components(first: str, second: str) -> None:
    one, other = escape(first), escape(second)
    assert is_safe_component(one), one
    assert is_safe_component(other), other
    assert (one == other) == (first == second)
    assert (one.lower() == other.lower()) == (first == second)
    assert one == one.lower()


@given(names, st.integers(0, 40), st.characters(codec=None, exclude_categories=()))
@settings(max_examples=400, deadline=None)
def test_a_name_that_differs_in_one_place_gives_another_component(name: str, position: int, character: str) -> None:
    edited = name[:position] + character + name[position + 1 :]
    assert (escape(name) == escape(edited)) == (name == edited)


def test_no_short_names_share_a_component() -> None:
    alphabet = "aA._%^~2e/"
    made = [("".join(letters)) for length in range(5) for letters in itertools.product(alphabet, repeat=length)]
    assert len({escape(name) for name in made}) == len(made)


# Leaf paths ---------------------------------------------------------------------------------------------------------


def test_leaf_paths_keep_dots_inside_keys_apart() -> None:
    assert leaf_path(()) == ""
    assert leaf_path(("hidden", 0)) == "hidden.0"
    assert leaf_path(("a.b",)) == "a%2eb"
    assert leaf_path(("a%2eb",)) == "a%252eb"
    assert len({leaf_path(path) for path in (("a", "b"), ("a.b",), ("a%2eb",), ("a", "", "b"), ("a..b",))}) == 5


@given(st.lists(st.text(max_size=6), min_size=1, max_size=3), st.lists(st.text(max_size=6), min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_leaf_paths_of_text_keys_are_distinct(first: list[str], second: list[str]) -> None:
    assert (leaf_path(first) == leaf_path(second)) == (first == second)


def test_leaf_paths_tell_a_position_from_a_key_of_the_same_digits() -> None:
    """A module may return ``{0: first, "0": second}``; both must be filed."""
    assert leaf_path((0,)) != leaf_path(("0",))


# Array names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({}, "activation"),
        ({"phase": "eval"}, "activation.eval"),
        ({"leaf": "hidden.0"}, "activation.hidden.0"),
        ({"dtype": "float16"}, "activation.float16"),
        ({"chunk": (64, 128)}, "activation.s64x128"),
        ({"chunk": ()}, "activation.scalar"),
        ({"calls": True}, "activation.calls"),
        ({"rank": 3}, "activation.rank3"),
        (
            {"leaf": "h", "phase": "eval", "dtype": "bfloat16", "chunk": (2, 4), "calls": True, "rank": 1},
            "activation.h.eval.bfloat16.s2x4.calls.rank1",
        ),
        ({"leaf": "eval"}, "activation.~eval"),
        ({"leaf": "float32"}, "activation.~float32"),
        ({"leaf": "s3"}, "activation.~s3"),
        ({"leaf": "s3x4"}, "activation.~s3x4"),
        ({"leaf": "scalar"}, "activation.~scalar"),
        ({"leaf": "calls"}, "activation.~calls"),
        ({"leaf": "rank0"}, "activation.~rank0"),
        ({"leaf": "~x"}, "activation.~~x"),
        ({"leaf": "."}, "activation.~.~"),
        ({"leaf": "a.eval.b"}, "activation.a.~eval.b"),
        ({"leaf": "Eval"}, "activation.^eval"),
        ({"leaf": "s"}, "activation.s"),
        ({"leaf": "s3x"}, "activation.s3x"),
        ({"leaf": "a/b"}, "activation.a%2fb"),
    ],
)
def test_array_names(arguments: dict[str, object], name: str) -> None:
    assert array_name("activation", **arguments) == name


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_array_is_named_by_its_kind(kind: str) -> None:
    assert array_name(kind) == kind


leaf_tokens = st.one_of(
    st.sampled_from(
        ["", "~", "~x", "~~x", "eval", "train", "calls", "scalar", "s3", "s3x4", "s3x", "rank1", "float32", "bool", "0", "x", "X", "a%2eb"]
    ),
    st.text(st.characters(exclude_characters="."), max_size=4),
)
array_coordinates = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "leaf": st.lists(leaf_tokens, max_size=3).map(".".join),
        "phase": st.sampled_from(PHASES),
        "dtype": st.sampled_from(["", *DTYPES]),
        "chunk": st.one_of(st.none(), st.lists(st.integers(1, 512), max_size=3).map(tuple)),
        "calls": st.booleans(),
        "rank": st.integers(0, 12),
    }
)


@given(st.lists(array_coordinates, min_size=2, max_size=8))
@settings(max_examples=300, deadline=None)
def test_array_names_are_distinct(together: list[dict[str, object]]) -> None:
    by_name: dict[str, dict[str, object]] = {}
    for coordinates in together:
        name = array_name(**coordinates)
        assert is_safe_component(name), name
        assert by_name.setdefault(name.lower(), coordinates) == coordinates


def test_array_names_of_every_clash_are_distinct() -> None:
    leaves = ["", ".", "eval", "~eval", "float32", "s3", "calls", "scalar", "rank1", "eval.float32", "float32.s3.calls.rank1", "~", "~~"]
    made = [
        array_name("activation", leaf=leaf, phase=phase, dtype=dtype, chunk=chunk, calls=calls, rank=rank)
        for leaf, phase, dtype, chunk, calls, rank in itertools.product(
            leaves, PHASES, ["", "float32"], [None, (), (3,), (3, 4)], [False, True], [0, 1]
        )
    ]
    assert len({name.lower() for name in made}) == len(made)


# Sizes of chunks ----------------------------------------------------------------------------------------------------


def place(shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Give every shape a chunk as the catalog does: the first one that fits, else a new one."""
    chunks: list[tuple[int, ...]] = []
    for shape in shapes:
        if not any(fits_chunk(shape, chunk) for chunk in chunks):
            chunk = size_class(shape, chunks[0]) if chunks else shape
            assert fits_chunk(shape, chunk)
            assert chunk not in chunks
            chunks.append(chunk)
    return chunks


def test_sequence_lengths_make_ten_arrays() -> None:
    assert place([(8, length, 64) for length in range(1, 513)]) == [(8, 1 << power, 64) for power in range(10)]
    assert len(place([(length, 8, 64) for length in range(1, 513)])) == 10


@pytest.mark.parametrize("first", [1, 5, 100, 512])
def test_sequence_lengths_make_few_arrays_in_any_order(first: int) -> None:
    assert len(place([(8, first, 64), *((8, length, 64) for length in range(512, 0, -1))])) <= 11


@pytest.mark.parametrize(("last", "chunks"), [(64, 1), (63, 1), (32, 1), (31, 2), (1, 2)])
def test_a_last_batch_of_at_least_half_the_chunk_is_padded(last: int, chunks: int) -> None:
    assert len(place([(64, 10), (last, 10)])) == chunks


def test_only_the_first_dimension_is_padded_that_far() -> None:
    assert fits_chunk((33, 10), (64, 10))
    assert not fits_chunk((31, 10), (64, 10))
    assert fits_chunk((64, 9), (64, 10))
    assert not fits_chunk((64, 8), (64, 10))
    assert not fits_chunk((65, 10), (64, 10))
    assert not fits_chunk((64, 10, 1), (64, 10))
    assert not fits_chunk((64,), (64, 10))
    assert fits_chunk((), ())


def test_size_classes_keep_what_is_usual() -> None:
    assert size_class((20, 10), (64, 10)) == (32, 10)
    assert size_class((64, 11), (64, 10)) == (64, 16)
    assert size_class((3, 3), (4,)) == (3, 3)
    assert size_class((), (4,)) == ()


@given(st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_every_shape_has_a_chunk_that_holds_it_and_wastes_little(shapes: list[tuple[int, int]]) -> None:
    chunks = place(shapes)
    for shape in shapes:
        chunk = next(chunk for chunk in chunks if fits_chunk(shape, chunk))
        assert all(size <= limit <= 2 * size for size, limit in zip(shape, chunk, strict=True))


# Shards -------------------------------------------------------------------------------------------------------------


@given(
    chunk_bytes=st.one_of(st.integers(1, 4096), st.integers(1, 1 << 34)),
    every=st.one_of(st.integers(1, 4), st.integers(1, 10_000)),
    epoch_batches=st.one_of(st.none(), st.integers(1, 100), st.integers(1, 1 << 40)),
    num_epochs=st.one_of(st.none(), st.integers(1, 1000)),
    calls=st.booleans(),
)
@example(chunk_bytes=64, every=1, epoch_batches=65_536, num_epochs=None, calls=False)
@example(chunk_bytes=1 << 28, every=100, epoch_batches=100, num_epochs=2, calls=False)
@example(chunk_bytes=64, every=1, epoch_batches=None, num_epochs=None, calls=True)
@settings(max_examples=500, deadline=None)
def test_shards_are_within_their_limits(
    chunk_bytes: int, every: int, epoch_batches: int | None, num_epochs: int | None, calls: bool
) -> None:
    shape = shard_shape(chunk_bytes, every=every, epoch_batches=epoch_batches, num_epochs=num_epochs, calls=calls)
    assert len(shape) == 2 + calls
    assert all(size >= 1 for size in shape)
    assert math.prod(shape) <= MAX_SHARD_ENTRIES
    epochs, batches = shape[:2]
    captures = epochs * math.ceil(batches / every) * (CALLS_PER_SHARD if calls else 1)
    least = CALLS_PER_SHARD if calls else 1
    assert captures * chunk_bytes <= SHARD_TARGET_BYTES or captures == least
    if epochs > 1:
        assert batches == epoch_batches, "a shard of several epochs covers them whole"
    if num_epochs is not None:
        assert epochs <= num_epochs


def test_shards_are_about_as_large_as_they_may_be() -> None:
    assert shard_shape(1 << 20) == (1, 256)
    assert shard_shape(1 << 20, every=100) == (1, 25_600)
    assert shard_shape(1 << 20, epoch_batches=100) == (2, 100)
    assert shard_shape(1 << 20, epoch_batches=1000) == (1, 256)
    assert shard_shape(1 << 10, epoch_batches=100, num_epochs=10) == (10, 100)
    assert shard_shape(64, epoch_batches=10_000) == (6, 10_000)
    assert shard_shape(1 << 30) == (1, 1)
    assert shard_shape(1 << 20, calls=True) == (1, 16, CALLS_PER_SHARD)


def make_spec(shards: tuple[int, ...], chunk: tuple[int, ...] = (4, 3)) -> ArraySpec:
    return ArraySpec("layer", "activation", "train", "", "float32", "activation", chunk, shards)


@pytest.mark.parametrize("shards", [(1, 1), (2, 3), (3, 1), (2, 3, 4), (1, 5, 16)])
def test_places_in_a_shard_are_one_to_one(shards: tuple[int, ...]) -> None:
    spec = make_spec(shards)
    grid = [range(2 * size) for size in (*shards, 1)[:3]] if len(shards) == 3 else [range(2 * shards[0]), range(2 * shards[1]), range(1)]
    places: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
    for coordinates in itertools.product(*grid):
        shard, entry = spec.shard_of(*coordinates), spec.entries(*coordinates)
        assert 0 <= entry < spec.num_entries
        assert (shard, entry) not in places
        places[shard, entry] = coordinates
        # The index is in C order over the inner chunks of the shard.
        within = [coordinate % size for coordinate, size in zip(coordinates, shards, strict=False)]
        assert entry == sum(position * math.prod(shards[axis + 1 :]) for axis, position in enumerate(within))
        assert shard == tuple(coordinate // size for coordinate, size in zip(coordinates, shards, strict=False))
        assert all(coordinate in there for coordinate, there in zip(coordinates, spec.shard_ranges(shard), strict=True))
    entries_by_shard = {shard: {entry for other, entry in places if other == shard} for shard, _ in places}
    assert all(entries == set(range(spec.num_entries)) for entries in entries_by_shard.values())
    assert len({spec.shard_key(shard) for shard in entries_by_shard}) == len(entries_by_shard)


@given(
    shards=st.tuples(st.integers(1, 64), st.integers(1, 1000), st.integers(1, 16)),
    one=st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 1 << 20)),
    other=st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 1 << 20)),
)
@settings(max_examples=200, deadline=None)
def test_distinct_coordinates_have_distinct_places(
    shards: tuple[int, int, int], one: tuple[int, int, int], other: tuple[int, int, int]
) -> None:
    spec = make_spec(shards)
    places = [(spec.shard_of(*where), spec.entries(*where)) for where in (one, other)]
    assert (places[0] == places[1]) == (one == other)
    keys = {spec.shard_key(spec.shard_of(*where)) for where in (one, other)}
    assert len(keys) == len({spec.shard_of(*where) for where in (one, other)})
    ranges = spec.shard_ranges(spec.shard_of(*one))
    assert all(coordinate in there for coordinate, there in zip(one, ranges, strict=True))
    assert all(coordinate in there for coordinate, there in zip(other, ranges, strict=True)) == (places[0][0] == places[1][0])
    assert all(is_shard_key(key) for key in keys)


def test_shard_keys() -> None:
    assert make_spec((1, 4), (2, 3)).shard_key((5, 6)) == "c.5.6.0.0"
    assert make_spec((1, 4), ()).shard_key((5, 6)) == "c.5.6"
    assert make_spec((1, 4, 16), (2,)).shard_key((0, 1, 2)) == "c.0.1.2.0"
    assert unsealed_name("c.0.1") == ".c.0.1.unsealed"


@pytest.mark.parametrize("text", ["", "c", "c.", "c.-1", "c.01", "c.0.", "c.0/0", "c.0\n", "../c.0", ".c.0", "c.0.unsealed", "d.0", "c.٣"])
def test_what_is_no_shard_key(text: str) -> None:
    assert not is_shard_key(text)


def test_sizes_of_an_array() -> None:
    spec = make_spec((2, 3), (4, 3))
    assert (spec.chunk_bytes, spec.stride_bytes, spec.num_entries, spec.calls) == (48, 64, 6, False)
    assert make_spec((2, 3), (4, 4)).stride_bytes == 128, "the checksum needs room too"
    assert make_spec((2, 3, 16), ()).num_entries == 96
    assert make_spec((2, 3, 16), ()).calls
    assert make_spec((1, 1)).path == "layer/activation"


@pytest.mark.parametrize(("value", "multiple", "aligned"), [(0, 64, 0), (1, 64, 64), (64, 64, 64), (65, 64, 128)])
def test_align(value: int, multiple: int, aligned: int) -> None:
    assert align(value, multiple) == aligned


# Files of the manifest ----------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(0, 100), st.integers(0, 10_000_000), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_names_of_segments_and_parts_come_back(rank: int, attempt: int, index: int, crc: int) -> None:
    assert parse_segment_name(segment_name(rank, attempt, index)) == (rank, attempt, index)
    assert parse_part_name(part_name(rank, attempt, index, crc)) == ((rank, attempt, index), crc)
    assert parse_part_name(segment_name(rank, attempt, index)) is None
    assert parse_segment_name(part_name(rank, attempt, index, crc)) is None


@pytest.mark.parametrize(
    "name", ["", ".r0-a0-000000-00000000.parquet.writing", "r0-a0-0-0.parquet", "part.parquet", "r0-a0-000000-0000000G.parquet"]
)
def test_other_files_are_no_parts(name: str) -> None:
    assert parse_part_name(name) is None


def test_names_of_segments_and_parts_are_pinned() -> None:
    assert segment_name(2, 1, 7) == "r2-a1-000007.journal"
    assert part_name(2, 1, 7, 0xAB) == "r2-a1-000007-000000ab.parquet"


# Tables -------------------------------------------------------------------------------------------------------------


def test_rows_and_columns_agree() -> None:
    assert Row._fields == (*(name for name, _, _ in MANIFEST_COLUMNS), PORTION_COLUMN[0], WHOLE_SHAPE_COLUMN[0], "statistics")
    assert len(set(Row._fields)) == len(Row._fields)


def test_fill_bits_are_the_fill_value() -> None:
    import ml_dtypes
    import numpy as np

    for dtype in DTYPES.values():
        if dtype.numpy is None or dtype.itemsize > 8:
            continue
        kind = np.dtype(getattr(ml_dtypes, dtype.numpy, None) or dtype.numpy)
        assert kind.itemsize == dtype.itemsize
        value = np.array([dtype.fill_bits], dtype=f"<u{dtype.itemsize}").view(kind)[0]
        if dtype.fill_value == "NaN":
            assert value != value, f"{dtype.name}: {value!r}"  # noqa: PLR0124
        elif isinstance(dtype.fill_value, str):
            assert dtype.fill_bits == int(dtype.fill_value, 16)
        else:
            assert dtype.fill_bits == 0, dtype.name
