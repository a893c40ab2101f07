"""Statistics against exact arithmetic: every dtype, the numbers at the ends of what floats hold, blocks, strides, devices."""

from __future__ import annotations

import math
import subprocess
import sys
import tracemalloc
import warnings
from decimal import Context, Decimal
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from hookstore import device_statistics
from hookstore.errors import OptionError
from hookstore.format import DTYPES
from hookstore.sink import TORCH_DTYPES
from hookstore.statistics import NO_STATISTICS, STATISTICS_DTYPE, Statistics, as_numbers, divided, of_rows, of_tensor

BOUND = 1e-12
TORCH_OF_NAME = {name: dtype for dtype, name in TORCH_DTYPES.items()}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SHAPES = [(), (0,), (1,), (7,), (3, 0), (2, 3), (5, 1, 4), (130,)]


def numbers_of(array):
    """Return what is computed with: float64, moduli of complex numbers."""
    with np.errstate(all="ignore"):
        if array.dtype.kind != "c":
            return array.astype(np.float64).ravel()
        elements = array.astype(np.complex128).ravel().tolist()
    return np.array([math.nan if math.isnan(z.real) or math.isnan(z.imag) else math.hypot(z.real, z.imag) for z in elements])


def root(square):
    context = Context(prec=40, Emax=10**6, Emin=-(10**6))
    return float(context.sqrt(context.divide(Decimal(square.numerator), Decimal(square.denominator))))


def as_float(number):
    try:
        return float(number)
    except OverflowError:
        return math.inf


def exact(array):
    """Compute statistics with fractions."""
    values = numbers_of(array).tolist()
    finite = [Fraction(value) for value in values if math.isfinite(value)]
    num_nan = sum(map(math.isnan, values))
    zeros = sum(value == 0 for value in values) / len(values) if values else None
    counts = (num_nan, len(values) - len(finite) - num_nan)
    if not finite:
        return Statistics(None, None, None, None, None, 0.0, zeros, *counts)
    mean = sum(finite) / len(finite)
    squares = sum(value * value for value in finite)
    std = root(sum((value - mean) ** 2 for value in finite) / len(finite))
    ends = (float(min(finite)), float(max(finite)), float(max(map(abs, finite))))
    return Statistics(as_float(mean), std, *ends, root(squares), zeros, *counts)


def assert_equals(found, wanted, array):
    """Compare with the bounds that the docstring states."""
    assert (found.zeros, found.nan, found.inf) == (wanted.zeros, wanted.nan, wanted.inf)
    ends = 1e-15 if array.dtype.kind == "c" else 0.0
    if wanted.mean is None:
        assert found == wanted
        return
    values = np.abs(numbers_of(array))
    mean_size = as_float(sum(map(Fraction, values[np.isfinite(values)].tolist())) / int(np.isfinite(values).sum()))
    tiny = 5e-324  # what rounding can do near the smallest number that there is
    assert abs(found.mean - wanted.mean) <= max(1e-13 * mean_size, 2 * tiny)
    for name in ("std", "l2"):
        mine, true = getattr(found, name), getattr(wanted, name)
        assert mine == true or abs(min(mine, sys.float_info.max) - true) <= max(BOUND * true, 2 * tiny), name
    for name in ("min", "max", "absmax"):
        mine, true = getattr(found, name), getattr(wanted, name)
        assert abs(mine - true) <= max(ends * true, tiny if ends else 0), name
    if wanted.min == wanted.max:
        assert found.std == 0


def statistics_of(array):
    return Statistics.of_record(of_tensor(array))


def device_statistics_of(tensor):
    vector = device_statistics.compute(tensor)
    assert (vector.shape, vector.dtype, vector.requires_grad) == ((9,), torch.float64, False)
    return Statistics.of_record(device_statistics.to_records(vector.numpy()[None])[0])


def tensor_of(bits, name):
    return torch.from_numpy(bits.copy()).view(TORCH_OF_NAME[name])


@st.composite
def stored(draw):
    """Bits of a tensor as they are stored, and the name of its dtype: any bits, or few that are near the ends and repeat."""
    name = draw(st.sampled_from(sorted(DTYPES)))
    dtype = DTYPES[name]
    is_wide = dtype.itemsize == 16
    width = 8 if is_wide else dtype.itemsize
    top = 2 ** (8 * width) - 1
    halves = {0, 1, 2, 3, top, top - 1, top // 2, top // 2 + 1, top // 2 + 2}
    numbers = [0.0, -0.0, 1.0, -1.0, 1e6, math.inf, -math.inf, math.nan]
    numbers += [1.7976931348623157e308, -1.7976931348623157e308, 5e-324, 2.2e-308, 1e300, 1e-300] if width == 8 else []
    if "float" in name or "complex" in name:
        as_numpy = {"complex32": np.float16, "complex64": np.float32, "complex128": np.float64}.get(name)
        as_numpy = as_numpy or np.dtype(getattr(ml_dtypes, name, None) or name)
        with np.errstate(all="ignore"):
            halves |= set(np.array(numbers).astype(as_numpy).view(UNSIGNED[np.dtype(as_numpy).itemsize]).tolist())
    elements = st.integers(0, 1) if name == "bool" else st.sampled_from(sorted(halves)) | st.integers(0, top)
    shape = draw(st.sampled_from(SHAPES))
    count = math.prod(shape) * (1 + is_wide)
    if draw(st.booleans()):
        elements = st.sampled_from(draw(st.lists(elements, min_size=1, max_size=2)))
    bits = np.array(draw(st.lists(elements, min_size=count, max_size=count)), UNSIGNED[width])
    return (bits.view(np.complex128) if is_wide else bits).reshape(shape), name


@settings(max_examples=250, deadline=None)
@given(stored())
def test_arrays_and_tensors_of_any_bits_have_exact_statistics(drawn):
    bits, name = drawn
    numbers = as_numbers(bits, name)
    wanted = exact(numbers)
    assert_equals(statistics_of(numbers), wanted, numbers)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf")
        tensor = tensor_of(bits, name)
        assert_equals(device_statistics_of(tensor), wanted, numbers)
        if tensor.dtype == torch.complex128 and bits.ndim == 1:
            assert_equals(device_statistics_of(tensor.conj().imag), exact(-numbers.imag), numbers.imag)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_is_taken_on_both_sides(name):
    """All bits of the short floats, and every seventh of the integers."""
    itemsize = DTYPES[name].itemsize
    if name == "bool":
        bits = np.array([0, 1, 1, 0, 1], np.uint8)
    elif itemsize <= 2:
        bits = np.arange(0, 256**itemsize, 1 if "float" in name or itemsize == 1 else 7).astype(UNSIGNED[itemsize])
    else:
        bits = np.random.default_rng(0).integers(0, 256, 40 * itemsize, dtype=np.uint8)
        bits = bits.view(UNSIGNED.get(itemsize, np.complex128))
    numbers = as_numbers(bits, name)
    wanted = exact(numbers)
    assert_equals(statistics_of(numbers), wanted, numbers)
    assert_equals(device_statistics_of(tensor_of(bits, name)), wanted, numbers)


@pytest.mark.parametrize(
    "values",
    [
        [1e300, -3e300, 2e300, 0.0, 1e-300],
        [1e-300, 3e-300, -2e-300, 0.0],
        [5e-324, 1e-323, 0.0],
        [1.7976931348623157e308] * 3,
        [1.7976931348623157e308, -1.7976931348623157e308, 1.0],
        [1e200, math.nan, 1e-200, math.inf, 0.0],
        [1e-310, math.nan, -math.inf],
    ],
)
def test_squares_that_float64_does_not_hold_are_summed_all_the_same(values):
    array = np.array(values)
    assert_equals(statistics_of(array), exact(array), array)
    assert_equals(device_statistics_of(torch.tensor(values, dtype=torch.float64)), exact(array), array)
    other = np.array([[1.0, 2.0, math.nan, *[0.0] * (len(values) - 3)], values])
    for row, found in zip(other, of_rows(other), strict=True):
        assert_equals(Statistics.of_record(found), exact(row), row)


def test_an_l2_norm_beyond_float64_is_infinite():
    array = np.full(70_000, 1.7e308)
    for found in (statistics_of(array), device_statistics_of(torch.from_numpy(array))):
        assert (found.l2, found.std) == (math.inf, 0.0)
        assert found.mean == pytest.approx(1.7e308, rel=1e-13)
        assert (found.nan, found.inf) == (0, 0)


def test_integers_at_their_ends():
    array = np.array([-(2**63), 2**63 - 1, 0])
    assert_equals(statistics_of(array), exact(array), array)
    found = statistics_of(np.array([2**64 - 1] * 3, np.uint64))
    assert (found.mean, found.std, found.absmax) == (2.0**64, 0.0, 2.0**64)
    assert statistics_of(np.array([-(2**63)])).absmax == 2.0**63
    assert statistics_of(np.array([-128, 127], np.int8)).absmax == 128


def test_bytes_of_a_bool_count_as_one_whatever_they_are():
    assert statistics_of(np.array([0, 2, 255, 1], np.uint8).view(bool)) == statistics_of(np.array([0, 1, 1, 1]))


def test_what_is_undefined_is_none():
    empty = Statistics(None, None, None, None, None, 0.0, None, 0, 0)
    for shape in ((0,), (3, 0, 2)):
        assert statistics_of(np.zeros(shape, np.float32)) == empty
        assert device_statistics_of(torch.zeros(shape)) == empty
    nothing = Statistics(None, None, None, None, None, 0.0, 0.0, 2, 1)
    values = [math.nan, -math.inf, math.nan]
    assert statistics_of(np.array(values, np.float32)) == nothing
    assert device_statistics_of(torch.tensor(values)) == nothing
    assert of_rows(np.zeros((0, 5))).shape == (0,)
    assert of_rows(np.zeros((4, 0)))["nan"].tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="holds no statistics"):
        Statistics.of_record(NO_STATISTICS)


def test_nan_comes_before_infinity_in_a_complex_number():
    values = [complex(math.inf, math.nan), complex(math.nan, -math.inf), complex(1, math.inf), complex(3, -4), 0j]
    wanted = Statistics(2.5, 2.5, 0.0, 5.0, 5.0, 5.0, 0.2, 2, 1)
    for dtype in (np.complex64, np.complex128):
        array = np.array(values, dtype)
        assert statistics_of(array) == wanted
        assert device_statistics_of(torch.from_numpy(array)) == wanted


def test_a_modulus_beyond_float64_counts_as_infinite():
    array = np.array([1.7e308 + 1.7e308j, 1 + 0j])
    for found in (statistics_of(array), device_statistics_of(torch.from_numpy(array))):
        assert (found.inf, found.max) == (1, 1.0)


def long_reference(array):
    """Compute mean and standard deviation in extended precision."""
    wide = array.astype(np.longdouble)
    mean = wide.mean()
    distances = wide - mean
    variance = np.square(distances).mean() - distances.mean() ** 2  # the mean is rounded as well
    return float(mean), float(np.sqrt(variance)), float(np.sqrt(np.square(wide).sum()))


@pytest.mark.parametrize("offset", [0.0, 1e6, -1e12])
@pytest.mark.parametrize("drift", [0.0, 3.0, 1e9])
def test_blocks_are_joined_without_loss(offset, drift, monkeypatch):
    """The noise is a millionth of the distance from zero and less, and the mean moves from block to block."""
    monkeypatch.setattr(device_statistics, "_PIECE", 10_000)
    size = 300_001
    array = offset + np.random.default_rng(0).standard_normal(size) * 1e-3 + drift * np.linspace(0, 1, size)
    mean, std, l2 = long_reference(array)
    for found in (statistics_of(array), device_statistics_of(torch.from_numpy(array))):
        assert found.mean == pytest.approx(mean, rel=0, abs=1e-13 * np.abs(array).mean())
        assert found.std == pytest.approx(std, rel=BOUND, abs=0)
        assert found.l2 == pytest.approx(l2, rel=BOUND, abs=0)
        assert (found.min, found.max, found.zeros) == (array.min(), array.max(), 0.0)


def test_blocks_with_and_without_gaps_are_joined(monkeypatch):
    """A whole block of NaN, one of infinities, one of zeros, the numbers at the ends in different ones."""
    monkeypatch.setattr(device_statistics, "_PIECE", 65_536)
    array = np.random.default_rng(0).standard_normal(65_536 * 5 + 17).astype(np.float32)
    array[:65_536] = np.nan
    array[65_536 : 2 * 65_536] = -np.inf
    array[2 * 65_536 : 3 * 65_536] = 0
    array[-1], array[-17] = -77, 99
    array[4 * 65_536 :: 1000] = np.nan
    finite = array[np.isfinite(array)]
    mean, std, l2 = long_reference(finite)
    for found in (statistics_of(array), device_statistics_of(torch.from_numpy(array))):
        assert (found.min, found.max, found.absmax) == (-77, 99, 99)
        assert (found.nan, found.inf) == (np.isnan(array).sum(), np.isinf(array).sum())
        assert found.zeros == (array == 0).sum() / array.size
        assert (found.mean, found.std, found.l2) == pytest.approx((mean, std, l2), rel=BOUND, abs=1e-13)


def test_blocks_of_extreme_numbers_share_a_scale(monkeypatch):
    monkeypatch.setattr(device_statistics, "_PIECE", 65_536)
    array = np.random.default_rng(0).standard_normal(200_000)
    array[:65_536] *= 1e-310
    wanted = long_reference(array)
    for factor in (2.0**1000, 2.0**-900):
        for found in (statistics_of(array * factor), device_statistics_of(torch.from_numpy(array * factor))):
            moments = (found.mean / factor, found.std / factor, found.l2 / factor)
            assert moments == pytest.approx(wanted, rel=BOUND, abs=1e-15)
            assert (found.min, found.zeros) == (array.min() * factor, (array * factor == 0).mean())


def test_a_constant_has_its_own_value_as_mean_and_no_deviation():
    for value in (0.1, 1e6 + 0.1, -3e-7):
        for size in (3, 1000, 200_000):
            array = np.full(size, value)
            for found in (statistics_of(array), device_statistics_of(torch.from_numpy(array))):
                assert (found.mean, found.std) == (value, 0.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.complex64, np.uint8, bool])
@pytest.mark.parametrize("num_elements", [1, 2, 128, 129, 640, 40_000, 65_536, 65_537])
def test_rows_are_what_their_tensors_are(dtype, num_elements):
    """The rows lie behind one another with room in between, some with gaps."""
    num_rows = 5 if num_elements > 1000 else 1203
    numbers = np.random.default_rng(num_elements).integers(0, 9, (num_rows, num_elements + 3))
    array = (numbers - 3.0 if dtype not in (np.uint8, bool) else numbers % 2).astype(dtype)
    if np.dtype(dtype).kind in "fcV":
        array[1::3, 0] = np.nan
    rows = array[:, :num_elements]
    records = of_rows(rows)
    assert records.dtype == STATISTICS_DTYPE
    for index in range(0, num_rows, max(num_rows // 20, 1)):
        alone, one = Statistics.of_record(records[index]), statistics_of(rows[index].copy())
        assert np.array(alone, float) == pytest.approx(np.array(one, float), rel=1e-14, nan_ok=True)
    values = rows.astype(np.complex64 if np.dtype(dtype).kind == "c" else np.float64)
    assert np.array_equal(records["nan"], np.isnan(values).sum(axis=1))
    assert np.array_equal(records["zeros"], (values == 0).mean(axis=1))
    assert np.allclose(records["l2"], np.sqrt(np.nansum(np.abs(values).astype(np.float64) ** 2, axis=1)), rtol=1e-12)


def layouts(array):
    """Return the same elements laid out in other ways, as NumPy arrays and as tensors."""
    spread = np.zeros((*array.shape, 2), array.dtype)
    spread[..., 1] = array
    yield from (array, np.asfortranarray(array), array.transpose(2, 0, 1), spread[..., 1], array[::-1, :, ::-1], array.swapaxes(0, 1))
    tensor = torch.from_numpy(array)
    yield from (tensor, tensor.permute(2, 0, 1), torch.from_numpy(spread)[..., 1], tensor.transpose(0, 1).contiguous().transpose(0, 1))


def test_strides_make_no_difference(monkeypatch):
    monkeypatch.setattr(device_statistics, "_PIECE", 1000)
    array = np.random.default_rng(0).standard_normal((30, 41, 83)).astype(np.float32)
    array[3, 4, 5], array[6, 7, 8], array[9] = np.nan, np.inf, 0
    wanted = statistics_of(array.copy())
    for same in layouts(array):
        found = statistics_of(same) if isinstance(same, np.ndarray) else device_statistics_of(same)
        assert found == pytest.approx(wanted, rel=1e-13)
        assert found[2:5] + found[6:] == wanted[2:5] + wanted[6:]
    expanded = np.broadcast_to(array[0, 0], (1000, 83))
    assert statistics_of(expanded) == pytest.approx(statistics_of(expanded.copy()), rel=1e-12)
    assert device_statistics_of(torch.from_numpy(array[0, 0]).expand(1000, 83)) == pytest.approx(statistics_of(expanded), rel=1e-12)


def test_pieces_of_a_tensor_are_views_or_small(monkeypatch):
    monkeypatch.setattr(device_statistics, "_PIECE", 100)
    tensor = torch.arange(24_000.0).reshape(20, 30, 40)
    own = tensor.untyped_storage().data_ptr()
    for laid in (tensor, tensor.permute(1, 2, 0)):
        assert {piece.untyped_storage().data_ptr() for piece in device_statistics._pieces(laid)} == {own}
    for laid in (tensor[:, ::2], tensor[..., 3:5], tensor[:, :, :1].expand(20, 30, 40), tensor[0, 0, 0].expand(7, 50)):
        pieces = list(device_statistics._pieces(laid))
        assert max(map(len, pieces)) <= 100
        assert all(piece.untyped_storage().data_ptr() == own or piece.untyped_storage().nbytes() <= 400 for piece in pieces)
        assert torch.equal(torch.cat(pieces).sort().values, laid.flatten().sort().values)


def test_lazily_conjugated_and_negated_tensors_are_taken_for_what_they_mean():
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert device_statistics_of(tensor.conj()) == statistics_of(tensor.numpy())
    assert device_statistics_of(tensor.conj().imag) == statistics_of(np.array([-2.0, 4.0], np.float32))
    assert tensor.conj().imag.is_neg()


def test_the_tensor_is_left_as_it_is():
    for dtype in (torch.float64, torch.float32):
        tensor = torch.tensor([1.0, math.nan, -3.0], dtype=dtype, requires_grad=True)
        before = tensor.detach().clone()
        device_statistics_of(tensor)
        of_tensor(tensor.detach().numpy())
        assert torch.equal(tensor.nan_to_num(9.0), before.nan_to_num(9.0))


@pytest.mark.parametrize("name", sorted(TORCH_OF_NAME))
def test_nothing_waits_for_the_device(name, monkeypatch):
    """Tensors without values can be computed with only where no value is asked for."""
    monkeypatch.setattr(device_statistics, "_PIECE", 5)
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf")
        for shape in ((), (0,), (3, 4)):
            vector = device_statistics.compute(torch.empty(shape, dtype=TORCH_OF_NAME[name], device="cuda"))
            assert (vector.device.type, vector.shape) == ("cuda", (9,))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", sorted(TORCH_OF_NAME))
def test_a_cuda_device_computes_the_same_without_being_waited_for(name, monkeypatch):
    monkeypatch.setattr(device_statistics, "_PIECE", 10)
    bits = np.random.default_rng(0).integers(0, 2 if name == "bool" else 256, 48 * DTYPES[name].itemsize, dtype=np.uint8)
    bits = bits.view(UNSIGNED.get(DTYPES[name].itemsize, np.complex128))
    tensor = tensor_of(bits, name).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        vector = device_statistics.compute(tensor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = Statistics.of_record(device_statistics.to_records(vector.cpu().numpy()[None])[0])
    numbers = as_numbers(bits, name)
    assert_equals(found, exact(numbers), numbers)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.complex64, ml_dtypes.float8_e5m2])
def test_nothing_large_is_made_of_a_large_tensor(dtype):
    array = np.ones((1000, 2000), dtype)
    array[0, 0] = np.nan
    tracemalloc.start()
    try:
        for laid in (array, array[:, :1500]):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            of_tensor(laid)
            assert tracemalloc.get_traced_memory()[1] - before < 3 << 20, "buffers of a few blocks"
    finally:
        tracemalloc.stop()


def test_statistics_of_a_scaled_tensor_are_divided():
    array = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)
    array[0, 0], array[1, 0], array[2] = 0, np.inf, np.nan
    scales = np.array([2.0**16, 3.0, 2.0, np.nan])
    found = divided(of_rows(array), scales)
    with np.errstate(invalid="ignore"):
        wanted = of_rows(array / np.where(np.isnan(scales), 1, scales)[:, None])
    for name in STATISTICS_DTYPE.names:
        assert np.allclose(found[name], wanted[name], rtol=1e-12, atol=1e-17, equal_nan=True), name
    assert np.array_equal(divided(of_rows(array), math.nan)[["l2", "nan"]], of_rows(array)[["l2", "nan"]])
    none = np.full(2, NO_STATISTICS)
    assert divided(none, 8.0).tobytes() == none.tobytes()
    assert divided(of_tensor(array[0]), 2.0)["max"] == array[0].max() / 2


def test_records_take_72_bytes_little_endian():
    assert STATISTICS_DTYPE.itemsize == 72
    assert STATISTICS_DTYPE.names == Statistics._fields
    assert of_tensor(np.array([3.0, -4.0])).tobytes() == np.array([-0.5, 3.5, -4, 3, 4, 5, 0, 0, 0], "<f8").tobytes()


def test_bits_that_make_no_numbers_are_refused():
    bits = np.arange(4, dtype=np.uint16)
    with pytest.raises(OptionError, match=r"expected one of bool, uint8.*, got 'float7'"):
        as_numbers(bits, "float7")
    with pytest.raises(OptionError, match="expected elements of 4 bytes for float32, got uint16"):
        as_numbers(bits, "float32")
    with pytest.raises(OptionError, match="expected elements of 4 bytes for complex32, got uint16"):
        as_numbers(bits, "complex32")
    with pytest.raises(OptionError, match="got dtype object"):
        of_tensor(np.array([None]))
    with pytest.raises(OptionError, match="got dtype <U1"):
        of_tensor(np.full(70_000, "x"))
    with pytest.raises(OptionError, match=r"two dimensions.*got shape \(4,\)"):
        of_rows(bits)


def test_stored_bits_become_numbers():
    bits = np.array([0x3F80], np.uint16)
    assert np.shares_memory(bits, as_numbers(bits, "bfloat16"))
    assert as_numbers(bits, "bfloat16")[0] == 1
    numbers = np.array([1 + 2j, -3.5 + 0.25j], np.complex64)
    halves = np.array([[1, 2], [-3.5, 0.25]], np.float16)
    assert np.array_equal(as_numbers(halves.view(np.uint32)[:, 0], "complex32"), numbers)
    assert as_numbers(halves.view(np.uint32)[0, 0].reshape(()), "complex32") == 1 + 2j
    assert as_numbers(numbers, "complex32") is numbers


def test_reading_statistics_needs_no_torch():
    code = "import sys, hookstore.statistics; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
