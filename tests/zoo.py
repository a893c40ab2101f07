"""Models of many kinds, small, and what each of their layers computes, found without a hook.

`Reference` runs a model whose modules' ``forward`` is wrapped: what comes in and goes out is cloned, and the gradient edge of each output is noted. Gradients
then come from ``torch.autograd.grad`` over these edges. Nothing here uses hookstore or a hook, and nothing changes what the model computes.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

# Values and their leaves ------------------------------------------------------------------------------------------------


def flatten(value, path=()):
    """Yield (path, tensor or other object) for what a value holds; nothing for None. A key that looks like a position is marked; none holds a dot."""
    if value is None:
        return
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(item, (*path, f"~{key}" if isinstance(key, str) and key.isdigit() else str(key)))
    elif isinstance(value, tuple) and (hasattr(value, "_fields") or hasattr(value, "n_sequence_fields")):
        for name, item in zip(value._fields if hasattr(value, "_fields") else type(value).__match_args__, value, strict=True):
            yield from flatten(item, (*path, name))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from flatten(item, (*path, str(index)))
    elif dataclasses.is_dataclass(value):
        for one in dataclasses.fields(value):
            yield from flatten(getattr(value, one.name), (*path, one.name))
    else:
        yield path, value


def leaves_of(value):
    """Return {leaf name: tensor} and {leaf name: other object}."""
    tensors, others = {}, {}
    for path, item in flatten(value):
        (tensors if isinstance(item, torch.Tensor) else others)[".".join(path)] = item
    return tensors, others


def arguments_of(args, kwargs):
    """Return the same of what a module is called with: a single argument stands for itself unless keywords hold tensors too."""
    named_tensors, named_others = leaves_of(kwargs)
    if len(args) == 1 and not named_tensors:
        tensors, others = leaves_of(args[0])
        return tensors, {**others, **named_others}
    return leaves_of({**dict(enumerate(args)), **kwargs})


def bits(tensor):
    """Return the bytes of a tensor, so that NaN and -0.0 compare as they are."""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return str(whole.dtype), tuple(whole.shape), whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""


# The reference -----------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """One call of one layer."""

    inputs: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    input_edges: dict[str, Any]
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    edges: dict[str, Any] = field(default_factory=dict)
    returned: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    shares: dict[str, torch.Tensor] = field(default_factory=dict)


class Probe(torch.autograd.Function):
    """An identity with a gradient edge of its own, which stays in the graph when the value is edited in place, and which one module's share goes through."""

    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient


class Reference:
    """What each layer of a model is called with and returns.

    Parameters
    ----------
    model : torch.nn.Module
        Its modules are wrapped for good.
    probed : set of str
        Layers whose output is returned as a copy with an edge of its own: views that are edited in place later, which takes their edge out of the graph.
    shared : set of str
        Layers that are given their inputs in this way, so that what they add to the gradient of each can be told from what others do.

    Attributes
    ----------
    calls : dict of str to list of Seen
        The calls of each layer since `begin`.
    edited : set of str
        Layers that returned a view which was edited in place before its gradient was asked for.
    editing : set of str
        Layers that edit an input in place.
    passed : set of (layer, leaf)
        Inputs that are handed on as they are: their gradient is that of the tensor.
    others : set of (kind, layer, leaf, type name)
        What is no tensor.
    """

    def __init__(self, model, probed=frozenset(), shared=frozenset()):
        self.probed, self.shared = probed, shared
        self.editing: set[str] = set()
        self.passed: set[tuple[str, str]] = set()
        self.calls: dict[str, list[Seen]] = {}
        self.edited: set[str] = set()
        self.others: set[tuple[str, str, str, str]] = set()
        for name, module in model.named_modules():
            if type(module).forward is not nn.Module.forward:  # a container has none of its own
                module.forward = self._wrap(name, module, module.forward)

    def begin(self):
        self.calls = {}

    def _wrap(self, name, module, forward):
        @functools.wraps(forward)
        def wrapped(*args, **kwargs):
            if sys._getframe(1).f_code.co_name != "_call_impl":
                return forward(*args, **kwargs)  # called directly, which no hook would see
            if name in self.shared:
                probes: dict[int, torch.Tensor] = {}
                args, kwargs = with_probes(args, probes), with_probes(kwargs, probes)
            seen = self._entered(name, module, args, kwargs)
            versions = [(value, value._version) for _, value in flatten((args, kwargs)) if isinstance(value, torch.Tensor)]
            output = forward(*args, **kwargs)
            if any(value._version != version for value, version in versions):
                self.editing.add(name)
            if name in self.probed:
                output = Probe.apply(output)
            self._left(name, seen, output)
            given = arguments_of(args, kwargs)[0]
            self.passed |= {(name, leaf) for leaf, tensor in given.items() if any(tensor is one for one in seen.returned.values())}
            return output

        return wrapped

    def _entered(self, name, module, args, kwargs):
        tensors, others = arguments_of(args, kwargs)
        self.others |= {("input", name, leaf, type(other).__name__) for leaf, other in others.items()}
        parameters = {leaf: value.detach().clone() for leaf, value in parameters_of(module).items()}
        seen = Seen({leaf: tensor.detach().clone() for leaf, tensor in tensors.items()}, parameters, edges_of(tensors))
        self.calls.setdefault(name, []).append(seen)
        return seen

    def _left(self, name, seen, output):
        tensors, others = leaves_of(output)
        self.others |= {("activation", name, leaf, type(other).__name__) for leaf, other in others.items()}
        seen.returned = tensors
        seen.outputs = {leaf: tensor.detach().clone() for leaf, tensor in tensors.items()}
        seen.edges = edges_of(tensors)

    def differentiate(self, loss, *, shares):
        """Find the gradient of a loss with respect to each output, and with ``shares`` what each call adds to those of its inputs."""
        calls = [(name, seen) for name, calls in self.calls.items() for seen in calls]
        self.edited |= {
            name
            for name, seen in calls
            for leaf, edge in seen.edges.items()
            if seen.returned[leaf]._base is not None and get_gradient_edge(seen.returned[leaf]).node is not edge.node
        }
        wanted = [(seen, leaf) for _, seen in calls for leaf in seen.edges]
        gradients = torch.autograd.grad(loss, [seen.edges[leaf] for seen, leaf in wanted], allow_unused=True, retain_graph=True)
        for (seen, leaf), gradient in zip(wanted, gradients, strict=True):
            if gradient is not None:
                assert leaf not in seen.gradients, "two losses of the zoo reach one output"
                seen.gradients[leaf] = gradient.detach().clone()
        if shares:
            wanted = [(seen, leaf) for _, seen in calls for leaf in seen.input_edges]
            found = torch.autograd.grad(loss, [seen.input_edges[leaf] for seen, leaf in wanted], allow_unused=True, retain_graph=True)
            for (seen, leaf), share in zip(wanted, found, strict=True):
                if share is not None:
                    seen.shares[leaf] = share.detach().clone()


def with_probes(value, probes):
    """Rebuild a value with a probe in the place of each tensor that wants a gradient: one for a tensor that is there twice."""
    if isinstance(value, torch.Tensor):
        if not (value.requires_grad and torch.is_grad_enabled()):
            return value
        if id(value) not in probes:
            probes[id(value)] = Probe.apply(value)
        return probes[id(value)]
    if type(value) in (dict, OrderedDict):
        return type(value)((key, with_probes(item, probes)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(with_probes(item, probes) for item in value))
    return type(value)(with_probes(item, probes) for item in value) if type(value) in (tuple, list) else value


def parameters_of(module):
    """Return a module's own parameters by name; where it is parametrized, what it has in their place."""
    own = {leaf: value for leaf, value in module._parameters.items() if value is not None}
    for name, one in getattr(module, "parametrizations", {}).items():
        own.update({f"parametrizations.{name}.{leaf}": value for leaf, value in one.named_parameters()})
    return own


def edges_of(tensors):
    if not torch.is_grad_enabled():
        return {}
    return {leaf: get_gradient_edge(tensor) for leaf, tensor in tensors.items() if tensor.requires_grad}


PLAN = (("train", 0), ("eval", 0), ("train", 1))  # phase and batch of each step


@dataclass
class Truth:
    """What a recording must hold: ``values[kind, phase, batch, layer, call, leaf]``, and whether the shares among them are exact or rounded otherwise."""

    values: dict[tuple[str, str, int, str, int, str], torch.Tensor] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)
    edited: set[str] = field(default_factory=set)
    editing: set[str] = field(default_factory=set)
    passed: set[tuple[str, str]] = field(default_factory=set)
    others: set[tuple[str, str, str, str]] = field(default_factory=set)
    layers_seen: set[str] = field(default_factory=set)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    has_exact_shares: bool = True

    @property
    def layers(self):
        return {key[3] for key in self.values}


def truth(name, kinds):
    """Find out without hooks what the layers of a model of the zoo compute during the plan."""
    found = _observe(name, {*kinds, "gradient"})
    if found.edited:
        probed = _observe(name, {*kinds, "gradient"}, probed=frozenset(found.edited))
        assert _is_same(found, probed), "the probes changed the model"
        found.values = probed.values
    if "input_gradient" in kinds:
        # (a layer that edits its input hands on the edited one, which a copy would keep from whoever else holds it)
        shared = frozenset(found.layers_seen - found.editing)
        probed = _observe(name, {*kinds, "gradient"}, probed=frozenset(found.edited), shared=shared, states=found.states)
        found.has_exact_shares = _is_same(found, probed)
        whole = {key for key in found.values if key[3] in found.editing or (key[3], key[5]) in found.passed}
        shares = {key: value for key, value in probed.values.items() if key[0] == "input_gradient" and key not in whole}
        found.values = {key: value for key, value in found.values.items() if key[0] != "input_gradient" or key in whole} | shares
    found.values = {key: value for key, value in found.values.items() if key[0] in kinds}
    return found


def _is_same(plain, probed):
    """Say whether a model computed the same bits with probes as without: they may change the order in which gradients are added up."""
    return [bits(loss) for loss in probed.losses] == [bits(loss) for loss in plain.losses] and all(
        key not in plain.values or bits(plain.values[key]) == bits(value)
        for key, value in probed.values.items()
        if key[0] != "input_gradient"
    )


def _observe(name, kinds, *, probed=frozenset(), shared=frozenset(), states=()):
    model = fresh(name)
    reference = Reference(model, probed, shared)
    found = Truth(edited=reference.edited, editing=reference.editing, passed=reference.passed, others=reference.others)
    optimizer = optimizer_of(model)
    for number, (phase, batch) in enumerate(PLAN):
        reference.begin()
        if states:
            model.load_state_dict(states[number])  # so that roundings do not add up from step to step
        found.states.append({key: value.clone() for key, value in model.state_dict().items()})

        def backward(loss):
            found.losses.append(loss.detach().clone())
            if loss.requires_grad:
                reference.differentiate(loss, shares="input_gradient" in kinds)
                loss.backward()

        take_step(name, model, phase, batch, backward)
        found.layers_seen |= reference.calls.keys()
        for layer, calls in reference.calls.items():
            for call, seen in enumerate(calls):
                for kind, tensors in (
                    ("activation", seen.outputs),
                    ("gradient", seen.gradients),
                    ("input", seen.inputs),
                    ("input_gradient", seen.shares),
                    ("parameter", seen.parameters),
                ):
                    if kind in kinds:
                        found.values.update({(kind, phase, batch, layer, call, leaf): tensor for leaf, tensor in tensors.items()})
        if phase == "train":
            if "parameter_gradient" in kinds:
                for layer, module in model.named_modules():
                    for leaf, parameter in parameters_of(module).items():
                        if layer in reference.calls and parameter.grad is not None:
                            found.values["parameter_gradient", phase, batch, layer, 0, leaf] = parameter.grad.clone()
            optimizer.step()
    return found


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def take_step(name, model, phase, batch, backward):
    """Run one batch of a model of the zoo: always the same numbers."""
    model.train(phase == "train")
    model.zero_grad()
    torch.manual_seed(1000 + batch)
    ZOO[name].step(model, batch, backward)


# Models ------------------------------------------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """Embedding, an LSTM over packed sequences, and a projection whose weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.rnn = nn.LSTM(6, 6, num_layers=2, dropout=0.2)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(6, 20)
        self.head.weight = self.embedding.weight

    def forward(self, sequences):
        packed = pack_sequence(sequences, enforce_sorted=False)
        embedded = packed._replace(data=self.embedding(packed.data))
        output, _ = self.rnn(PackedSequence(*embedded))
        padded, lengths = pad_packed_sequence(output)
        return self.head(self.drop(padded)), lengths


class CellModel(nn.Module):
    """Recurrent cells called once a step, with the state carried along."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTMCell(4, 5)
        self.gru = nn.GRUCell(5, 5)
        self.rnn = nn.GRU(5, 3, bidirectional=True, batch_first=True)
        self.projected = nn.LSTM(6, 8, proj_size=2, batch_first=True)

    def forward(self, sequence):
        state, hidden = None, None
        outputs = []
        for step in sequence.unbind(1):
            state = self.lstm(step, state)
            hidden = self.gru(state[0], hidden)
            outputs.append(hidden)
        return self.projected(self.rnn(torch.stack(outputs, 1))[0])


class Block(nn.Module):
    """A decoder block that returns (hidden, cache)."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, hidden, *, cache=None):
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm1(hidden)).chunk(3, dim=-1))
        if cache is not None:
            key, value = torch.cat((cache["key"], key), 2), torch.cat((cache["value"], value), 2)
        is_causal = cache is None and query.shape[2] > 1
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        mixed = self.mlp(self.norm2(hidden))
        mixed += hidden
        return mixed, {"key": key, "value": value}


class Decoder(nn.Module):
    """A GPT-style decoder: in training one pass, in evaluation token by token with a cache."""

    def __init__(self, width=8, depth=2):
        super().__init__()
        self.tokens = nn.Embedding(16, width)
        self.places = nn.Embedding(12, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, caches=None):
        start = 0 if caches is None else caches[0]["key"].shape[2]
        hidden = self.tokens(tokens) + self.places(torch.arange(start, start + tokens.shape[1]))
        caches = caches or [None] * len(self.blocks)
        grown = []
        for block, cache in zip(self.blocks, caches, strict=True):
            hidden, cache = block(hidden, cache=cache)  # noqa: PLW2901
            grown.append(cache)
        return {"logits": self.head(self.norm(hidden)), "caches": grown}


class Gan(nn.Module):
    """Two models in one; the training calls them one by one."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 6), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.2), nn.Linear(8, 1))


class OddLayers(nn.Module):
    """Layers that are rarely met: complex values, several dtypes, tables, bilinear forms, attention with and without weights, named results."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 4, mode="mean")
        self.bilinear = nn.Bilinear(4, 4, 4)
        self.fourier = Fourier()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.top = Top()
        self.wide = nn.Linear(4, 4).double()
        self.prelu = nn.PReLU()
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.twice = Twice()
        self.fold = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten(1), nn.Identity())

    def forward(self, indices, offsets):
        bagged = self.bag(indices, offsets)
        mixed = self.fourier(self.bilinear(bagged, bagged))
        attended, weights = self.attention(mixed[None], mixed[None], mixed[None])
        values, chosen = self.top(self.prelu(attended[0]))
        wide = self.wide(self.norm(attended[0]).double())
        folded = self.fold(wide)
        folded += 1
        return values.sum() + self.twice(folded).float().sum() + weights.sum() + chosen.sum() * 0


class Fourier(nn.Module):
    def forward(self, values):
        return torch.fft.ifft(torch.fft.fft(values).conj()).real


class Top(nn.Module):
    def forward(self, values):
        return values.topk(2, dim=-1)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value * 2, value.detach() * 0

    @staticmethod
    def backward(context, gradient, _ignored):
        return gradient * 2


class Twice(nn.Module):
    def forward(self, value):
        return Double.apply(value)[0]


def swin():
    return torchvision.models.SwinTransformer([4, 4], 8, [1, 1], [1, 2], [2, 2], stochastic_depth_prob=0.1, num_classes=4)


def vit():
    return torchvision.models.VisionTransformer(16, 8, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16, dropout=0.1, num_classes=4)


def faster_rcnn():
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=3, min_size=48, max_size=64, box_detections_per_img=4
    )
    model.rpn._pre_nms_top_n = model.rpn._post_nms_top_n = {"training": 20, "testing": 10}
    model.roi_heads.fg_bg_sampler.batch_size_per_image = 8
    return model


def transformers():
    return pytest.importorskip("transformers", reason="needs the package transformers, which is in the extra 'test'")


def bert():
    library = transformers()
    config = library.BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        num_labels=4,
    )
    return library.BertForSequenceClassification(config)


def gpt2():
    library = transformers()
    return library.GPT2LMHeadModel(
        library.GPT2Config(vocab_size=30, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )


def t5():
    library = transformers()
    return library.T5ForConditionalGeneration(
        library.T5Config(vocab_size=30, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0)
    )


def hf_vit():
    library = transformers()
    config = library.ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8, num_labels=4,
        hidden_dropout_prob=0.1,
    )  # fmt: skip
    return library.ViTForImageClassification(config)


# Steps: each makes the batch from its number, so that the lengths differ, and returns the losses to go backward in turn ---------


def classify(*size, samples=2, classes=4):
    def step(model, number, backward):
        logits = model(torch.randn(samples, *size))
        auxiliary = ()
        if isinstance(logits, tuple):
            logits, *auxiliary = logits
        loss = F.cross_entropy(logits, torch.randint(0, classes, (samples,)))
        backward(loss + sum(0.3 * F.cross_entropy(one, torch.randint(0, classes, (samples,))) for one in auxiliary))

    return step


def read_sequences(model, number, backward):
    sequences = [torch.randint(0, 20, (length,)) for length in (3, 5 + number, 2)]
    logits, lengths = model(sequences)
    backward(F.cross_entropy(logits.flatten(0, 1), torch.randint(0, 20, (logits.shape[0] * logits.shape[1],))) + lengths.sum() * 0)


def run_cells(model, number, backward):
    output, (hidden, _) = model(torch.randn(2, 3 + number, 4))
    backward(output.square().mean() + hidden.sum())


def translate(model, number, backward):
    source, target = torch.randn(2, 5 + number, 8), torch.randn(2, 4, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    backward(model(source, target, tgt_mask=mask, tgt_is_causal=True).square().mean())


def decode(model, number, backward):
    tokens = torch.randint(0, 16, (2, 5 + number))
    if model.training:
        return backward(F.cross_entropy(model(tokens[:, :-1])["logits"].transpose(1, 2), tokens[:, 1:]))
    caches, logits = None, []
    for place in range(3):
        output = model(tokens[:, place : place + 1], caches)
        caches = output["caches"]
        logits.append(output["logits"])
    return backward(torch.cat(logits, 1).square().mean())


def play(model, number, backward):
    fake = model.generator(torch.randn(3, 4))
    real_loss = F.softplus(-model.discriminator(torch.randn(3, 6))).mean()
    fake_loss = F.softplus(model.discriminator(fake.detach())).mean()
    backward(fake_loss)
    backward(real_loss)  # in another order than the forwards
    backward(F.softplus(-model.discriminator(fake)).mean())


def detect(model, number, backward):
    images = [torch.rand(3, 40, 50), torch.rand(3, 48, 36 + 4 * number)]
    if model.training:
        targets = [{"boxes": torch.tensor([[2.0, 3.0, 30.0, 31.0]]), "labels": torch.tensor([1 + one])} for one in range(2)]
        return backward(sum(model(images, targets).values()))
    found = model(images)
    return backward(sum((one["boxes"].sum() + one["scores"].sum() for one in found), torch.zeros(())))


def odd_batch(model, number, backward):
    backward(model(torch.randint(0, 10, (6 + number,)), torch.tensor([0, 2, 4])))


def tokens_to(**options):
    def step(model, number, backward):
        ids = torch.randint(1, 30, (2, 5 + number))
        given = {name: make(ids) for name, make in options.items()}
        backward(model(input_ids=ids, **given).loss)

    return step


def hf_images(model, number, backward):
    backward(model(torch.randn(2, 3, 16, 16), labels=torch.randint(0, 4, (2,))).loss)


def four_classes(ids):
    return ids[:, 0] % 4


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes
    ----------
    build : callable
        Makes the model.
    step : callable
        Takes the model, the number of the batch and a function to hand each loss to.
    is_slow : bool
        Whether it is left to the long tests.
    """

    build: Callable[[], nn.Module]
    step: Callable[[nn.Module, int, Callable[[torch.Tensor], None]], None]
    is_slow: bool = False


ZOO = OrderedDict(
    resnet18=Entry(lambda: torchvision.models.resnet18(num_classes=4), classify(3, 32, 32)),
    mobilenet_v3_small=Entry(lambda: torchvision.models.mobilenet_v3_small(num_classes=4), classify(3, 32, 32)),
    vgg11=Entry(lambda: small_vgg(torchvision.models.vgg11(num_classes=4)), classify(3, 32, 32)),
    densenet=Entry(lambda: torchvision.models.DenseNet(4, (2, 2), 8, drop_rate=0.1, num_classes=4), classify(3, 32, 32)),
    googlenet=Entry(lambda: torchvision.models.GoogLeNet(num_classes=4, aux_logits=True, init_weights=False), classify(3, 64, 64)),
    vit=Entry(vit, classify(3, 16, 16)),
    swin=Entry(swin, classify(3, 32, 32)),
    faster_rcnn=Entry(faster_rcnn, detect),
    language_model=Entry(LanguageModel, read_sequences),
    cells=Entry(CellModel, run_cells),
    transformer=Entry(lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), translate),
    decoder=Entry(Decoder, decode),
    gan=Entry(Gan, play),
    odd_layers=Entry(OddLayers, odd_batch),
    bert=Entry(bert, tokens_to(labels=four_classes, attention_mask=torch.ones_like)),
    gpt2=Entry(gpt2, tokens_to(labels=torch.clone)),
    t5=Entry(t5, tokens_to(labels=torch.clone)),
    hf_vit=Entry(hf_vit, hf_images),
    densenet121=Entry(lambda: torchvision.models.densenet121(num_classes=4), classify(3, 64, 64), is_slow=True),
    swin_t=Entry(lambda: torchvision.models.swin_t(num_classes=4), classify(3, 64, 64), is_slow=True),
    mobilenet_v3_large=Entry(lambda: torchvision.models.mobilenet_v3_large(num_classes=4), classify(3, 64, 64), is_slow=True),
)


def small_vgg(model):
    """Take away what is slow about a VGG: two linear layers with a hundred million weights."""
    model.avgpool = nn.AdaptiveAvgPool2d((1, 1))
    model.classifier[0], model.classifier[3], model.classifier[6] = nn.Linear(512, 32), nn.Linear(32, 32), nn.Linear(32, 4)
    return model


@functools.cache
def _built(name):
    torch.manual_seed(3)
    return ZOO[name].build()


def fresh(name):
    """Return a copy of a model of the zoo, always with the same weights."""
    return copy.deepcopy(_built(name))


def over_the_zoo(slow=frozenset()):
    """Parametrize a test over the zoo, with the largest models, and those named, left to the long tests."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.slow) if entry.is_slow or name in slow else name for name, entry in ZOO.items()]
    )


MANY_LAYERS = frozenset({"faster_rcnn", "googlenet", "mobilenet_v3_small"})  # each layer costs some arrays, and each array some files
