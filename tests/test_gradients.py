"""`gradient` and `input_gradient` against values worked out by hand, `autograd.grad` and full backward hooks."""

from __future__ import annotations

import copy
import gc
import random
import weakref

import pytest
import torch
from small import linear, values
from torch import nn

import hookstore

BOTH = ("gradient", "input_gradient")


def recording(model, path, **options):
    return hookstore.record(model, path, **{"buffer_bytes": 1 << 20, "kinds": BOTH, **options})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


class Calls(nn.Module):
    """A module that computes what a function does."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


# The module's own share --------------------------------------------------------------------------------------------


def test_share_is_the_modules_own_and_not_the_sum_over_all_users(path):
    model = nn.ModuleDict({"a": linear([2.0]), "b": linear([3.0])})
    with recording(model, path, layers=["a", "b"]):
        inputs = torch.ones(1, 1, requires_grad=True)
        hidden = inputs * 1
        (model["a"](hidden) + 10 * model["b"](hidden) + 100 * hidden).sum().backward()
    assert inputs.grad.item() == 132
    with hookstore.open(path) as run:
        assert values(run["a"].input_gradient, 0, 0) == [[2.0]]
        assert values(run["b"].input_gradient, 0, 0) == [[30.0]]


def test_first_layer_has_no_input_gradient_and_no_warning(path):
    model = linear([1.0], [1.0])
    with recording(model, path, layers=""):
        (3 * model(torch.tensor([[5.0]]))).sum().backward()
    with hookstore.open(path) as run:
        assert values(run[""].gradient, 0, 0) == [[3.0, 3.0]]
        with pytest.raises(hookstore.MissingCaptureError, match="this layer has gradient"):
            run[""].input_gradient[0, 0]


def test_keyword_inputs_and_inputs_inside_containers(path):
    model = Calls(lambda x, *, scale, more: x * scale + 7 * more["a"][0])
    with recording(model, path, layers=""):
        x, scale, third = (torch.tensor([value], requires_grad=True) for value in (3.0, 5.0, 1.0))
        model(x, scale=scale, more={"a": [third, None, "text"]}).backward()
    with hookstore.open(path) as run:
        gradients = run[""].input_gradient
        assert gradients.leaves == ["0", "more.a.0", "scale"]
        assert [values(gradients, 0, 0, leaf=leaf) for leaf in gradients.leaves] == [[5.0], [7.0], [3.0]]


def test_input_that_is_used_several_times_inside_is_summed_in_the_order_of_autograd(path):
    def use(x):
        return x.sin() * x.exp() + (x @ x.t()).sum(dim=1, keepdim=True) + x[:, :1] * x.mean() + x * x

    model, inputs = Calls(use), torch.randn(5, 3, requires_grad=True)
    weights = torch.randn(5, 3)
    expected = torch.autograd.grad((use(inputs * 1) * weights).sum(), inputs)[0]
    with recording(model, path, layers=""):
        (model(inputs * 1) * weights).sum().backward()
    with hookstore.open(path) as run:
        assert torch.equal(run[""].input_gradient.tensor(0, 0), expected)


def test_one_tensor_in_two_places_has_a_row_for_each_with_the_gradient_of_that_tensor(path):
    model = Calls(lambda a, b: 2 * a + 3 * b)
    with recording(model, path, layers=""):
        inputs = torch.ones(1, requires_grad=True)
        model(inputs, inputs).backward()
    with hookstore.open(path) as run:
        assert [values(run[""].input_gradient, 0, 0, leaf=leaf) for leaf in "01"] == [[5.0], [5.0]]


def test_module_that_passes_its_input_on(path):
    model = nn.Sequential(linear([2.0]), nn.Identity(), nn.Dropout(0.0), linear([3.0]))
    with recording(model, path, layers="*"):
        model(torch.ones(1, 1, requires_grad=True)).backward()
    with hookstore.open(path) as run:
        assert [values(run[str(layer)].input_gradient, 0, 0) for layer in range(4)] == [[[6.0]], [[3.0]], [[3.0]], [[3.0]]]
        assert values(run[""].input_gradient, 0, 0) == [[6.0]]


def test_leaf_that_is_passed_on_each_batch_collects_no_hooks(path):
    model, leaf = nn.Identity(), torch.ones(2, requires_grad=True)
    with recording(model, path, layers=""):
        for batch in range(4):
            (model(leaf) * (batch + 1)).sum().backward()
            assert len(leaf._backward_hooks) <= 2
    assert not leaf._backward_hooks
    with hookstore.open(path) as run:
        assert [values(run[""].input_gradient, 0, batch) for batch in range(4)] == [[batch + 1.0] * 2 for batch in range(4)]


def test_in_place_modules(path):
    model = nn.Sequential(linear([1.0, 0.0], [0.0, 1.0]), Calls(lambda x: x.mul_(5).add_(1)), nn.ReLU(inplace=True))
    with recording(model, path, layers="*"):
        (model(torch.tensor([[2.0, -3.0]], requires_grad=True)) * torch.tensor([10.0, 20.0])).sum().backward()
    with hookstore.open(path) as run:
        assert values(run["2"].input_gradient, 0, 0) == [[10.0, 0.0]]
        assert values(run["1"].input_gradient, 0, 0) == [[50.0, 0.0]]
        assert values(run["0"].input_gradient, 0, 0) == [[50.0, 0.0]]


def test_in_place_module_on_a_view(path):
    """A 3-D linear returns a view; the module that edits it is handed a view of a tensor from outside."""
    projection, inputs = nn.Linear(3, 4), torch.randn(2, 5, 3)
    weights = torch.randn(2, 5, 4)
    hidden = projection(inputs).detach().requires_grad_()
    (expected,) = torch.autograd.grad((hidden.mul(2).relu() * weights).sum(), hidden)
    model = nn.Sequential(projection, Calls(lambda x: x.mul_(2)), nn.ReLU(inplace=True))
    with recording(model, path):
        (model(inputs) * weights).sum().backward()
    with hookstore.open(path) as run:
        assert torch.equal(run["1"].input_gradient.tensor(0, 0), expected)
        assert torch.equal(run["0"].gradient.tensor(0, 0), expected)
        assert torch.equal(run["2"].input_gradient.tensor(0, 0), expected / 2)


def test_output_that_is_a_view_and_was_edited_through_another_view(path):
    """torch crashes where a hook is the first to look at it (pytorch#196459)."""

    def edit(x):
        x[:, :1].mul_(3)
        return x

    model = nn.Sequential(Calls(lambda x: (x * 1).view(2, 6)), Calls(edit))
    with recording(model, path):
        (model(torch.ones(4, 3, requires_grad=True)) * 2).sum().backward()
    with hookstore.open(path) as run:
        assert values(run["1"].gradient, 0, 0) == [[2.0] * 6] * 2
        assert values(run["1"].input_gradient, 0, 0) == values(run["0"].gradient, 0, 0) == [[6.0, 2, 2, 2, 2, 2]] * 2


def test_module_that_edits_a_part_of_its_input_and_uses_it_before(path):
    def edit(x):
        before = x * 3
        x[:, :1].mul_(10)
        return before + x

    inputs = torch.randn(4, 3, requires_grad=True)
    weights = torch.randn(4, 3)
    (expected,) = torch.autograd.grad((edit(inputs * 1) * weights).sum(), inputs)
    for number, make in enumerate((lambda: inputs * 1, lambda: (inputs.repeat(2, 1) * 1)[:4], lambda: (inputs * 1).t().contiguous().t())):
        model = Calls(edit)
        with recording(model, path.with_name(str(number)), layers=""):
            (model(make()) * weights).sum().backward()
        with hookstore.open(path.with_name(str(number))) as run:
            torch.testing.assert_close(run[""].input_gradient.tensor(0, 0), expected)


@pytest.mark.parametrize("used_before", [True, False])
def test_returned_view_of_the_input_that_is_edited_later_is_a_gap(path, used_before):
    model = nn.Flatten()
    with pytest.warns(hookstore.CaptureWarning, match="edited in place"), recording(model, path, layers=""):
        shared = torch.ones(2, 2, 2, requires_grad=True) * 1
        flat = model(shared)
        before = 3 * flat.sum() if used_before else 0
        flat.mul_(2)
        (before + flat.sum()).backward()
    with hookstore.open(path) as run:
        assert run[""].input_gradient.rows["status"].to_pylist() == ["skipped"]


def test_returned_view_of_the_input_without_edits(path):
    model = nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (2, 4)))
    weights = torch.arange(8.0).view(2, 4)
    with recording(model, path):
        (model(torch.ones(4, 2, requires_grad=True) * 1) * weights).sum().backward()
    with hookstore.open(path) as run:
        assert values(run["0"].input_gradient, 0, 0) == weights.view(4, 2).tolist()
        assert values(run["1"].input_gradient, 0, 0) == list(range(8))


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, first, count, second):
        ctx.count = count
        return first * count, second * count

    @staticmethod
    def backward(ctx, first, second):
        return first * ctx.count, None, second * ctx.count * 10


def test_custom_functions_and_layers_behind_them(path):
    model = Calls(lambda a, b: sum(Doubles.apply(a, 2, b)))
    outer = nn.Sequential(model, linear([3.0]))
    with recording(model, path, layers=""):
        a, b = (torch.ones(1, 1, requires_grad=True) for _ in range(2))
        outer[1](model(Doubles.apply(a, 1, b)[0], b)).backward()
    with hookstore.open(path) as run:
        assert [values(run[""].input_gradient, 0, 0, leaf=leaf) for leaf in "01"] == [[[6.0]], [[60.0]]]


def test_two_outputs_of_one_node(path):
    model = Calls(lambda x: Doubles.apply(x, 2, x + x))
    with recording(model, path, layers=""):
        inputs = torch.ones(1, requires_grad=True)
        first, second = model(inputs * 1)
        (first + second).backward()
    with hookstore.open(path) as run:
        assert values(run[""].input_gradient, 0, 0) == inputs.grad.tolist() == [42.0]


def test_several_outputs_of_which_one_is_used_are_finished_when_the_backward_ends(path):
    model = Calls(lambda x: (x * 2, x * 3, x * 5))
    with recording(model, path, layers=""):
        first, second, third = model(torch.ones(1, requires_grad=True))
        (first + third).backward(retain_graph=True)
        second.backward(retain_graph=True)
        (first + second + third).backward()
    with hookstore.open(path) as run:
        shares = run[""].input_gradient
        assert [values(shares, 0, 0, backward=backward) for backward in range(3)] == [[7.0], [3.0], [10.0]]


def test_backward_that_raises_leaves_nothing_for_the_next(path):
    class Fails(torch.autograd.Function):
        fails = True

        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            if Fails.fails:
                raise ArithmeticError
            return gradient * 2

    model = Calls(lambda x: Fails.apply(x) + (x * 3).exp().log())
    with recording(model, path, layers=""):
        output = model(torch.ones(1, requires_grad=True))
        with pytest.raises(ArithmeticError):
            output.backward(retain_graph=True)
        Fails.fails = False
        output.backward()
    with hookstore.open(path) as run:
        assert run[""].input_gradient[0, 0].tolist() == pytest.approx([5.0])


def test_calls_and_backwards_in_another_order(path):
    model = linear([2.0])
    with recording(model, path, layers="") as recorder, recorder.at(epoch=0, batch=0):
        losses = [scale * model(torch.ones(1, 1, requires_grad=True)) for scale in (1, 10, 100)]
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
    with hookstore.open(path) as run:
        assert [values(run[""].input_gradient, 0, 0, call) for call in range(3)] == [[[2.0]], [[20.0]], [[200.0]]]


def test_autograd_grad_and_create_graph(path):
    model = linear([3.0])
    with recording(model, path, layers="") as recorder, recorder.at(epoch=0, batch=0):
        inputs = torch.ones(1, 1, requires_grad=True)
        (first,) = torch.autograd.grad(model(inputs).pow(2).sum(), inputs, create_graph=True)
        first.sum().backward()
    assert model.weight.grad.item() == 12  # d(18) / dw: the user's own second derivative is whole
    with hookstore.open(path) as run:
        assert values(run[""].gradient, 0, 0, backward=0) == [[6.0]]
        assert values(run[""].input_gradient, 0, 0, backward=0) == [[18.0]]
        # the second backward goes through the same forward once more, with the second derivative
        assert values(run[""].gradient, 0, 0, backward=1) == [[6.0]]
        assert values(run[""].input_gradient, 0, 0, backward=1) == [[18.0]]


def test_autograd_grad_with_respect_to_a_weight_alone_gives_no_input_gradient(path):
    model = linear([3.0])
    with recording(model, path, layers=""):
        torch.autograd.grad(model(torch.ones(1, 1, requires_grad=True)).sum(), model.weight)
    with hookstore.open(path) as run:
        assert (len(run[""].gradient), len(run[""].input_gradient)) == (1, 0)


def test_sparse_contributions_come_as_their_parts(path):
    model = Calls(lambda weight: nn.functional.embedding(torch.tensor([1, 1]), weight, sparse=True))
    with recording(model, path, layers=""):
        weight = torch.ones(3, 2, requires_grad=True)
        model(weight).sum().backward()
    assert weight.grad.layout == torch.sparse_coo
    with hookstore.open(path) as run:
        share = run[""].input_gradient[0, 0]
        assert share.dense().tolist() == [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]
        assert share.values.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_functions_transforms_leave_the_users_call_alone(path):
    model = linear([3.0])
    with pytest.warns(hookstore.CaptureWarning, match="functorch"), recording(model, path, layers="", kinds="input_gradient"):
        assert torch.func.grad(lambda x: model(x).sum())(torch.ones(1, 1)).tolist() == [[3.0]]
    with hookstore.open(path) as run:
        assert run[""].input_gradient.rows["status"].to_pylist() == ["skipped"]


# Against full backward hooks -----------------------------------------------------------------------------------------


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, inputs):
        return self.norm(inputs + self.attention(inputs, inputs * 2, inputs * 3, need_weights=False)[0])


class Feeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.gate = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())

    def forward(self, inputs):
        return inputs + self.gate(inputs) * self.down(nn.functional.gelu(self.up(self.norm(inputs))))


MODELS = {
    "block": (lambda: nn.Sequential(nn.Linear(8, 8), Feeds(), Feeds(), nn.Linear(8, 3)), (2, 5, 8)),
    "attention": (lambda: nn.Sequential(nn.Linear(8, 8), Attends(), Attends()), (2, 5, 8)),
    "lstm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 6, num_layers=2), Calls(lambda x: x[0] + x[1][0].sum())), (5, 2, 8)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 4)),
        (2, 3, 8, 8),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_shares_equal_those_of_full_backward_hooks_to_the_bit(path, name):
    make, shape = MODELS[name]
    model = make()
    twin = copy.deepcopy(model)
    inputs = torch.randn(shape)
    kept, order = {}, []

    def keep(layer):
        def hook(_module, gradients, _of_output):
            order.append(layer)
            for position, gradient in enumerate(gradients):
                if gradient is not None:
                    kept[layer, position if len(gradients) > 1 else None] = gradient.clone()

        return hook

    wanted = [layer for layer, module in model.named_modules() if not isinstance(module, Calls) and not layer.endswith("out_proj")]
    for layer in wanted:
        twin.get_submodule(layer).register_full_backward_hook(keep(layer))
    twin(inputs.clone().requires_grad_()).pow(2).sum().backward()
    with recording(model, path, layers=wanted, kinds="input_gradient", buffer_bytes=16 << 20):
        model(inputs.clone().requires_grad_()).pow(2).sum().backward()
    with hookstore.open(path) as run:
        assert len(kept) == run.manifest["status"].to_pylist().count("ok") >= 3
        for (layer, position), gradient in kept.items():
            found = run[layer].input_gradient.tensor(0, 0, leaf=None if position is None else str(position))
            assert torch.equal(found, gradient), (layer, position)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


# Random programs -----------------------------------------------------------------------------------------------------

STEPS = [
    lambda x, _: x.sin(),
    lambda x, _: x.neg_(),
    lambda x, _: x.clone(),
    lambda x, _: x.view(-1).view_as(x),
    lambda x, _: x.detach() * 3 + x,
    lambda x, _: x.t().mul_(2).t(),
    lambda x, _: (x[:2].mul_(3), x)[1],
    lambda x, _: (x[:, :1].add_(1), x)[1],
    lambda x, y: x + y,
    lambda x, y: x.add_(y.clone()),
    lambda x, y: sum(Doubles.apply(x, 2, y)),
    lambda x, y: Doubles.apply(x, 3, y)[0],
]
INPUTS = [
    lambda leaf: leaf * 1,
    lambda leaf: (leaf * 1).view(4, 3),
    lambda leaf: (leaf.t() * 1).t(),
    lambda leaf: torch.cat([leaf, leaf.detach()])[:4],
]


def random_program(rng, num_inputs):
    """Return a function of tensors that edits, looks at and combines them at random, and returns one or two of them."""
    steps = [(rng.choice(STEPS), rng.randrange(9), rng.randrange(9)) for _ in range(rng.randint(1, 5))]
    outputs = [rng.randrange(9) for _ in range(rng.randint(1, 2))]

    def run(*inputs):
        assert len(inputs) == num_inputs
        known = list(inputs)
        for step, first, second in steps:
            known.append(step(known[first % len(known)], known[second % len(known)]))
        return tuple(known[-1 - output % (len(known) - num_inputs)] for output in outputs)

    return run


@pytest.mark.filterwarnings("ignore:.*edited in place:hookstore.CaptureWarning")
def test_shares_of_random_programs_with_edits_and_views_are_right_or_gaps(path):
    """Against `autograd.grad` through the same program in float64."""
    rng = random.Random(5)
    model, expected = Calls(None), {}
    with recording(model, path, layers="", kinds="input_gradient") as recorder:
        for batch in recorder.batches(range(250), epoch=0):
            leaves = [torch.randn(4, 3, requires_grad=True) for _ in range(rng.randint(1, 2))]
            model.function, make, edits = random_program(rng, len(leaves)), [rng.choice(INPUTS) for _ in leaves], rng.random() < 0.3
            weights = [torch.randn(4, 3) for _ in range(2)]
            precise = [leaf.detach().double().requires_grad_() for leaf in leaves]

            def loss(function, inputs, weights=weights, edits=edits):
                outputs = function(*inputs)
                if edits and len(outputs) == 1:
                    outputs[0].mul_(2)
                return sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=False))

            try:
                expected[batch] = torch.autograd.grad(
                    loss(model.function, [one(leaf) for one, leaf in zip(make, precise, strict=True)]), precise
                )
            except RuntimeError:  # the program is none: it edits what autograd has saved, or what it does not use
                continue
            loss(model, [one(leaf) for one, leaf in zip(make, leaves, strict=True)]).backward()
    with hookstore.open(path) as run:
        shares = run[""].input_gradient
        rows = {(row["batch"], row["leaf"]): row["status"] for row in shares.rows.to_pylist()}
        num_right = 0
        for batch, gradients in expected.items():
            for position, gradient in enumerate(gradients):
                leaf = str(position) if len(gradients) > 1 else ""
                if rows.get((batch, leaf)) == "ok":
                    torch.testing.assert_close(shares.tensor(0, batch, leaf=leaf).double(), gradient, rtol=1e-4, atol=1e-4)
                    num_right += 1
                else:
                    assert rows.get((batch, leaf)) == "skipped" or not gradient.any(), batch
        assert num_right > 100


# Lifetimes ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*edited in place:hookstore.CaptureWarning")
def test_graphs_and_tensors_do_not_pile_up(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Flatten(0), nn.Identity(), nn.ReLU(inplace=True), Calls(lambda x: x * x.sum()))

    class Marker:
        pass

    markers = []
    with recording(model, path):
        gc.disable()
        try:
            for backwards in (True, True, False, False, True):
                inputs = torch.ones(3, 2, requires_grad=True) * 1
                output = model(inputs)
                output.grad_fn.metadata["marker"] = marker = Marker()
                inputs.grad_fn.metadata["marker"] = other = Marker()
                markers += [weakref.ref(marker), weakref.ref(other)]
                if backwards:
                    output.sum().backward()
                del output, marker, other, inputs
                assert sum(marker() is not None for marker in markers) == 0
        finally:
            gc.enable()


def test_forward_that_raises_keeps_no_tensor(path):
    def fail(x):
        raise ArithmeticError

    model = nn.Sequential(nn.Identity(), Calls(fail))
    with recording(model, path, layers="*"):
        inputs = torch.ones(1, requires_grad=True) * 1
        gone = weakref.ref(inputs)
        with pytest.raises(ArithmeticError):
            model(inputs)
        del inputs
        gc.collect()
        assert gone() is None


# Gradients of outputs ----------------------------------------------------------------------------------------------


def test_output_that_is_cached_across_batches_has_each_batchs_gradient(path):
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = linear([2.0])
            self.cached = None

        def forward(self, inputs):
            if self.cached is None:
                self.cached = self.table(inputs)
            return self.cached

    model = Cache()
    with recording(model, path, layers=""):
        for batch in range(3):
            ((batch + 1) * model(torch.ones(1, 1, requires_grad=True))).backward(retain_graph=True)
            assert len(model.cached._backward_hooks) == 1
    with hookstore.open(path) as run:
        assert [values(run[""].gradient, 0, batch) for batch in range(3)] == [[[1.0]], [[2.0]], [[3.0]]]
        # there was one forward, that of batch 0, with three backwards over it
        assert [(values(run[""].input_gradient, 0, 0, backward=backward)) for backward in range(3)] == [[[2.0]], [[4.0]], [[6.0]]]
        assert run[""].input_gradient.rows["batch"].to_pylist() == [0] * 3


def test_edit_in_a_later_batch_of_an_output_that_is_kept(path):
    model = linear([2.0])
    with recording(model, path, layers=""):
        first = model(torch.ones(1, 1, requires_grad=True))
        second = model(torch.ones(1, 1, requires_grad=True))
        first.mul_(5)
        (first + second).backward()
    with hookstore.open(path) as run:
        assert [values(run[""].gradient, 0, batch) for batch in range(2)] == [[[5.0]], [[1.0]]]
        assert [values(run[""].input_gradient, 0, batch) for batch in range(2)] == [[[10.0]], [[2.0]]]


def test_retained_gradients_and_hooks_of_others_are_left_alone(path):
    model, seen = linear([2.0]), []
    with recording(model, path, layers=""):
        inputs = torch.ones(1, 1, requires_grad=True)
        output = model(inputs)
        output.retain_grad()
        output.register_hook(lambda gradient: 10 * gradient)
        output.grad_fn.register_hook(lambda ours, _: seen.append([gradient.item() for gradient in ours if gradient is not None]))
        output.backward()
    assert (output.grad.item(), inputs.grad.item(), seen) == (10.0, 20.0, [[20.0, 10.0]] if len(seen[0]) == 2 else seen)
    with hookstore.open(path) as run:
        assert values(run[""].gradient, 0, 0) == [[1.0]], "ours was there first, and sees what comes in"
        assert values(run[""].input_gradient, 0, 0) == [[20.0]]


def test_forwards_and_backwards_on_other_threads(path):
    from concurrent.futures import ThreadPoolExecutor

    model = linear([2.0])

    def step(scale):
        with torch.enable_grad():
            (scale * model(torch.ones(1, 1, requires_grad=True))).backward()
        return scale

    with (
        recording(model, path, layers="", kinds=("activation", *BOTH)) as recorder,
        recorder.at(epoch=0, batch=0),
        ThreadPoolExecutor(4) as pool,
    ):
        assert list(pool.map(step, [1.0] * 20)) == [1.0] * 20
    with hookstore.open(path) as run:
        for kind, value in (("activation", 2.0), ("gradient", 1.0), ("input_gradient", 2.0)):
            assert [values(run[""][kind], 0, 0, call) for call in range(20)] == [[[value]]] * 20


# Batches that are cut short ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [None, "2", ["", "0"]])
def test_forward_that_raises_marks_its_batch(path, layers):
    class Breaks(nn.Module):
        def forward(self, inputs):
            if inputs.sum() < 0:
                raise ArithmeticError("negative")
            return inputs

    model = nn.Sequential(nn.Identity(), Breaks(), nn.Identity())
    with recording(model, path, layers=layers, kinds="activation") as recorder:
        for item in recorder.batches([torch.ones(1), -torch.ones(1), torch.ones(1)], epoch=0):
            try:
                model(item)
            except ArithmeticError:
                assert item < 0
            assert all(len(layer._forward_hooks) <= 1 + (layer is model) for layer in model.modules())
    with hookstore.open(path) as run:
        (partial,) = run.partial_batches
        assert (partial.epoch, partial.batch) == (0, 1)
        assert "raised ArithmeticError: negative" in partial.reason
        assert run.batches(0) == ([0, 2] if layers == "2" else [0, 1, 2])


def test_module_that_returns_none_within_an_exception_handler_is_no_broken_batch(path):
    model = Calls(lambda: None)
    with pytest.warns(hookstore.CaptureWarning, match="returned a NoneType"), recording(model, path, layers="", kinds="activation"):
        try:
            raise ArithmeticError
        except ArithmeticError:
            model()
    with hookstore.open(path) as run:
        assert run.partial_batches == []


def test_early_stop_of_checkpointing_is_no_broken_batch(path):
    from torch.utils.checkpoint import checkpoint

    block = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    model = Calls(lambda x: checkpoint(block, x, use_reentrant=False))
    model.block = block
    with recording(model, path, layers="*", kinds=("activation", *BOTH)):
        for _ in range(2):
            model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    with hookstore.open(path) as run:
        assert run.partial_batches == []
        assert run.manifest["call"].to_pylist() == [0] * run.manifest.num_rows


def test_what_did_not_arrive_is_said_and_never_zero(path):
    """The layer was called: then no gradient arrived. Where it is not known whether it was called, nothing is claimed."""
    model = nn.Sequential(linear([2.0]), linear([3.0]))
    kinds = ["activation", "gradient", "input_gradient", "parameter_gradient"]
    with hookstore.record(model, path, kinds=kinds, buffer_bytes=1 << 20) as recorder:
        for batch in recorder.batches(range(2), epoch=0):
            output = model(torch.ones(1, 1))
            if batch:
                output.sum().backward()
                torch.optim.SGD(model[0].parameters(), lr=0.0).step()
    with hookstore.open(path) as run:
        assert run["0"].parameter_gradient[0, 1].tolist() == [[3.0]]
        assert run["1"].gradient[0, 1].tolist() == [[1.0]]
        for kind in ("gradient", "input_gradient"):
            with pytest.raises(hookstore.MissingCaptureError, match="no gradient arrived"):
                run["1"][kind][0, 0]
        with pytest.raises(hookstore.MissingCaptureError, match="no optimizer's step had a gradient of it there"):
            run["1"].parameter_gradient[0, 1]
        with pytest.raises(hookstore.MissingCaptureError, match="epoch 0 has batches 1") as error:
            run["1"].gradient[0, 7]
        assert "no gradient arrived" not in str(error.value)


class Forces(nn.Module):
    """Needs gradients whatever its caller says, as models of forces do."""

    def __init__(self):
        super().__init__()
        self.energy = linear([3.0])

    @torch.enable_grad()
    def forward(self, places):
        places = places.detach().requires_grad_()
        energy = self.energy(places * places)
        return energy, torch.autograd.grad(energy.sum(), places, create_graph=True)[0]


@pytest.mark.parametrize("caller", [torch.no_grad, torch.enable_grad])
def test_a_forward_that_turns_gradients_on_for_itself(path, caller):
    model = Forces()
    with recording(model, path, layers=["", "energy"], kinds=["activation", "gradient"]) as recorder, recorder.at(epoch=0, batch=0):
        with caller():
            energy, forces = model(torch.full((1, 1), 5.0))
        (7 * energy + 2 * forces).sum().backward()
    with hookstore.open(path) as run:
        assert values(run[""].activation, 0, 0, leaf="1") == [[30.0]]
        assert values(run[""].gradient, 0, 0, leaf="0") == [[7.0]]
        assert values(run[""].gradient, 0, 0, leaf="1") == [[2.0]]
        assert values(run["energy"].gradient, 0, 0, backward=0) == [[1.0]]
        with pytest.warns(hookstore.CaptureWarning, match="captured 2 times"):
            assert values(run["energy"].gradient, 0, 0) == [[7.0]]
