"""Splitting a model: what is built where, with which weights and names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stretto.errors import InputError
from stretto.ir.placement import Placement, custom, loop, v
from stretto.models import (
    LayerSpec,
    Partition,
    SharedSpec,
    build,
    by_class,
    describe_split,
    gpt_layers,
    partition,
    split,
)

PLACEMENTS = [
    loop(num_ranks=1),
    loop(num_ranks=2),
    loop(num_ranks=4),
    loop(num_ranks=2, stages_per_rank=2),
    loop(num_ranks=1, stages_per_rank=4),
    v(num_ranks=2),
    custom([0, 1, 0]),
]


def linears(num_layers: int) -> list[LayerSpec]:
    """Linear layers with dropout-free random weights."""
    return [LayerSpec(nn.Linear, 4, 4) for _ in range(num_layers)]


def all_stages(layers, placement: Placement, **keywords) -> dict[int, nn.Module]:
    """The stages of all ranks together."""
    return {
        stage: module
        for rank in range(placement.num_ranks)
        for stage, module in split(layers, placement, rank=rank, **keywords).items()
    }


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda each: str(each.replicas[0]))
def test_initial_weights_do_not_depend_on_the_split(placement):
    """Every split has the unsplit model's names and, bit for bit, its weights."""
    layers = gpt_layers(vocab_size=11, dim=8, num_layers=4, num_heads=2, context=5)
    whole = build(layers, seed=3).state_dict()
    parts = {}
    for rank in range(placement.num_ranks):
        torch.manual_seed(rank)
        for stage in split(layers, placement, rank=rank, seed=3).values():
            parts |= stage.state_dict()
    assert sorted(parts) == sorted(whole)
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_layers_and_seeds_have_their_own_weights():
    """Two layers of one description differ, and another seed gives other weights."""
    model = build(linears(2), seed=0)
    other = build(linears(2), seed=1)
    assert not torch.equal(model.layer("0").weight, model.layer("1").weight)
    assert not torch.equal(model.layer("0").weight, other.layer("0").weight)


def test_random_state_outside_is_untouched():
    """Building leaves the caller's random numbers as they were."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    split(linears(4), loop(num_ranks=2), rank=0)
    build(linears(4))
    assert torch.equal(torch.rand(3), expected)


def test_only_local_layers_are_built():
    """A rank calls the constructors of its own layers only."""
    built = []

    def make(index):
        built.append(index)
        return nn.Linear(2, 2)

    layers = [LayerSpec(make, index) for index in range(10)]
    placement = loop(num_ranks=2, stages_per_rank=2)
    for rank, expected in [(0, [0, 1, 5, 6, 7]), (1, [2, 3, 4, 8, 9])]:
        built.clear()
        assert list(split(layers, placement, rank=rank)) == [rank, rank + 2]
        assert built == expected


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda each: str(each.replicas[0]))
@pytest.mark.parametrize("num_layers", [4, 7, 10])
def test_stages_cover_the_layers_in_order(placement, num_layers):
    """Over all ranks, stages are disjoint ranges that ascend and cover every layer."""
    stages = all_stages(linears(num_layers), placement)
    names = [name for stage in sorted(stages) for name in stages[stage].layer_names]
    assert names == [str(index) for index in range(num_layers)]
    assert all(stages[stage].index == stage for stage in stages)


def test_the_chain_of_stages_equals_the_whole():
    """Running the stages one after the other gives the unsplit model's output."""
    layers = gpt_layers(vocab_size=11, dim=8, num_layers=3, num_heads=2, context=5)
    symbols = torch.arange(10).reshape(2, 5)
    stages = all_stages(layers, v(num_ranks=2), by=[1, 0, 3, 1])
    value = symbols
    for stage in range(4):
        value = stages[stage](value)
    assert torch.equal(value, build(layers)(symbols))


def test_a_list_may_mix_kinds_of_layers():
    """Modules are taken as they are, functions are called, descriptions are built."""
    linear = nn.Linear(4, 4)
    layers = [LayerSpec(nn.Linear, 4, 4), torch.tanh, linear, nn.ReLU()]
    stages = all_stages(layers, loop(num_ranks=2))
    assert stages[1].layer("2") is linear
    assert sorted(stages[0].state_dict()) == ["0.bias", "0.weight"]
    x = torch.randn(3, 4)
    expected = torch.relu(linear(torch.tanh(stages[0].layer("0")(x))))
    assert torch.equal(stages[1](stages[0](x)), expected)


@pytest.mark.parametrize("container", [nn.Sequential, lambda *each: nn.ModuleList(each)])
def test_sequential_and_module_list_are_layers(container):
    """A container's modules are split, and keep the container's parameter names."""
    model = container(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    stages = all_stages(model, loop(num_ranks=2))
    names = {name for stage in stages.values() for name in stage.state_dict()}
    assert names == set(model.state_dict())
    assert stages[0].layer("0") is model[0]


def test_named_children_keep_their_names():
    """Layers of an `nn.Sequential` with names are called by them."""
    model = nn.Sequential()
    model.add_module("embed", nn.Linear(4, 4))
    model.add_module("head", nn.Linear(4, 4))
    stages = all_stages(model, loop(num_ranks=2))
    assert sorted(stages[1].state_dict()) == ["head.bias", "head.weight"]


def test_a_shared_layer_is_one_module_in_its_stage():
    """All uses of a key in a stage are the same module, with the whole model's weights."""
    spec = LayerSpec(nn.Linear, 4, 4)
    layers = [SharedSpec("w", spec), nn.ReLU(), SharedSpec("w", spec), LayerSpec(nn.Linear, 4, 4)]
    stages = all_stages(layers, loop(num_ranks=2), by=[3, 1])
    assert stages[0].layer("0") is stages[0].layer("2")
    assert len(list(stages[0].parameters())) == 2
    assert torch.equal(stages[0].layer("2").weight, build(layers).layer("0").weight)


def test_sharing_across_stages_is_refused_on_every_rank():
    """A key, a module or a parameter used in two stages is refused with layers and stages."""
    spec = LayerSpec(nn.Linear, 4, 4)
    shared = [SharedSpec("w", spec), nn.ReLU(), SharedSpec("w", spec)]
    linear, tied = nn.Linear(4, 4), nn.Linear(4, 4)
    tied.weight = linear.weight
    for layers in (shared, [linear, nn.ReLU(), linear], [linear, nn.ReLU(), tied]):
        for rank in range(2):
            with pytest.raises(InputError, match=r"layers 0 and 2 share .* stages 0 and 1"):
                split(layers, loop(num_ranks=2), rank=rank)


def test_a_key_has_one_description():
    """Two descriptions under one key are refused."""
    layers = [SharedSpec("w", LayerSpec(nn.Linear, 4, 4)) for _ in range(2)]
    with pytest.raises(InputError, match="describe it differently"):
        split(layers, loop(num_ranks=1), rank=0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_placement_is_refused(rank):
    """A rank that owns nothing is named with the ranks there are."""
    with pytest.raises(InputError, match=rf"rank {rank} is not in 0\.\.1"):
        split(linears(2), loop(num_ranks=2), rank=rank)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (nn.Linear(2, 2), "cannot split a Linear"),
        (5, "cannot split a int"),
        ([nn.Linear(2, 2), nn.ReLU], "layer 1 is the class ReLU"),
        ([nn.Linear(2, 2), 7], "layer 1 is 7"),
        ([LayerSpec(dict), nn.ReLU()], "layer 0 was built as {}"),
    ],
)
def test_what_is_not_a_layer_is_refused(layers, message):
    """A model that is no list, and an item that is no layer, are named."""
    with pytest.raises(InputError, match=message):
        split(layers, loop(num_ranks=2), rank=0)


def test_descriptions_are_checked():
    """A description of something that cannot be called is refused where it is written."""
    with pytest.raises(InputError, match="LayerSpec needs a class or function, not 3"):
        LayerSpec(3)
    with pytest.raises(InputError, match="SharedSpec 'w' needs a LayerSpec"):
        SharedSpec("w", nn.ReLU())


def test_partition_tells_who_holds_what():
    """The stage of a layer and the layers of a stage agree; indices outside are refused."""
    parts = partition(gpt_layers(vocab_size=9, dim=8, num_layers=8, num_heads=1, context=4), 4)
    assert parts == Partition((2, 3, 3, 2))
    for stage in range(4):
        assert all(parts.which_stage(layer) == stage for layer in parts.layers_of(stage))
    assert Partition((1, 0, 1)).which_stage(1) == 2
    for layer in (-1, 10):
        with pytest.raises(InputError, match=rf"layer {layer} is not in 0\.\.9"):
            parts.which_stage(layer)
    with pytest.raises(InputError, match="stage 4"):
        parts.layers_of(4)


def test_the_split_can_be_printed():
    """The table has a row per stage: rank, layers and classes."""
    layers = gpt_layers(vocab_size=9, dim=8, num_layers=3, num_heads=1, context=4)
    table = describe_split(layers, v(num_ranks=2), by=[3, 1, 0, 1])
    assert table.splitlines() == [
        "stage  rank  layers  what",
        "    0     0  0-2     Embedding, 2 x Block",
        "    1     1  3       Block",
        "    2     1  none    -",
        "    3     0  4       Head",
    ]
    assert "1     1  2-4     2 x Block, Head" in describe_split(
        layers, loop(num_ranks=2), by=by_class("Block")
    )
