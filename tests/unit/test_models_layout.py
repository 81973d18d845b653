"""The layout: every element of a checkpoint lives in the shards exactly where Megatron computes with it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from megarl.models.layout import HeadKind, ModelSpec, ParamLayout, check_ep, check_tp, hf_shapes, plan_rank, plan_stage
from megarl.models.registry import FAMILIES
from megarl.parallel.schedule import interleaved, reversed_linear, reversed_v, v_shape
from megarl.parallel.topology import Topology

SPEC = ModelSpec(
    family="llama", num_layers=7, hidden_size=48, num_heads=8, num_kv_heads=4, head_dim=6, ffn_size=40,
    vocab_size=301, norm_eps=1e-5, max_positions=64, is_tied=False,
)  # fmt: skip
GRIDS = [(1, 1), (2, 1), (1, 2), (4, 3), (2, 7)]


def all_shards(
    family: str, spec: ModelSpec, tp: int, pp: int, head: HeadKind = "policy"
) -> list[tuple[int, int, ParamLayout]]:
    return [
        (tp_rank, stage, layout)
        for tp_rank, stage in itertools.product(range(tp), range(pp))
        for layout in plan_stage(FAMILIES[family], spec, tp, tp_rank, pp, stage, head)
    ]


@pytest.mark.parametrize(("tp", "pp"), GRIDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_and_column_lives_once(family: str, tp: int, pp: int) -> None:
    spec = dataclasses.replace(SPEC, is_tied=False)
    if FAMILIES[family].expert:
        spec = dataclasses.replace(spec, num_experts=3, expert_ffn_size=20)
    covered: dict[str, list[int]] = {}
    axes: dict[str, int] = {}
    for tp_rank, _, layout in all_shards(family, spec, tp, pp):
        if layout.is_replicated and tp_rank > 0:
            continue
        for piece in layout.slices:
            axes.setdefault(piece.hf_name, piece.axis)
            covered.setdefault(piece.hf_name, []).extend(range(piece.hf_start, piece.hf_start + piece.length))
    shapes = hf_shapes(FAMILIES[family], spec)
    assert covered.keys() == shapes.keys()
    for name, indices in covered.items():
        assert sorted(indices) == list(range(shapes[name][axes[name]])), name


@pytest.mark.parametrize(("tp", "pp"), GRIDS)
def test_slices_fill_each_parameter_without_overlap(tp: int, pp: int) -> None:
    for _, _, layout in all_shards("qwen2", SPEC, tp, pp):
        filled = [at for piece in layout.slices for at in range(piece.start, piece.start + piece.length)]
        assert len(filled) == len(set(filled))
        extent = layout.shape[layout.slices[0].axis] if layout.slices else 0
        assert set(filled) <= set(range(extent))
        if "word_embeddings" not in layout.name and "output_layer" not in layout.name:
            assert len(filled) == extent


def test_experts_are_dealt_out_in_runs() -> None:  # case A7
    spec = dataclasses.replace(SPEC, num_experts=4, expert_ffn_size=24)
    layouts = plan_stage(FAMILIES["mixtral"], spec, 2, 1, 1, 0, ep_size=2, ep_rank=1)
    first = next(layout for layout in layouts if "layers.6.mlp.experts.local_experts.0.linear_fc1" in layout.name)
    assert (first.layer, first.expert, first.shape) == (6, 2, (24, 48))
    gate, up = first.slices
    assert gate.hf_name == "model.layers.6.block_sparse_moe.experts.2.w1.weight" and up.hf_name.endswith("w3.weight")
    assert (gate.hf_start, gate.length, up.start) == (12, 12, 12)
    assert first.stem == "decoder.layers.mlp.experts.experts.linear_fc1.weight"


@pytest.mark.parametrize(("experts", "ep", "words"), [(0, 2, "no experts"), (6, 4, "use 1, 2, 3, 6")])
def test_experts_that_cannot_be_dealt_out_are_refused(experts: int, ep: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_ep(dataclasses.replace(SPEC, num_experts=experts, expert_ffn_size=24), ep)


def test_query_key_value_rows_are_interleaved_per_group() -> None:
    """Two query heads a group of 6 rows each: q q k v of group 2, then of group 3, on the second of two ranks."""
    layouts = {layout.name: layout for layout in plan_stage(FAMILIES["llama"], SPEC, 2, 1, 1, 0)}
    pieces = layouts["decoder.layers.0.self_attention.linear_qkv.weight"].slices
    expected = [("q_proj", 24, 12), ("k_proj", 12, 6), ("v_proj", 12, 6), ("q_proj", 36, 12), ("k_proj", 18, 6)]
    found = [(piece.hf_name.split(".")[-2], piece.hf_start, piece.length) for piece in pieces[:5]]
    assert found == expected
    assert [piece.start for piece in pieces] == [0, 12, 18, 24, 36, 42]


def test_gate_and_up_stay_apart_on_each_rank() -> None:  # case A7
    for tp_rank in range(2):
        layouts = {layout.name: layout for layout in plan_stage(FAMILIES["llama"], SPEC, 2, tp_rank, 1, 0)}
        gate, up = layouts["decoder.layers.0.mlp.linear_fc1.weight"].slices
        assert (gate.start, up.start, gate.hf_start, up.hf_start) == (0, 20, 20 * tp_rank, 20 * tp_rank)
        assert "gate_proj" in gate.hf_name and "up_proj" in up.hf_name


def test_vocabulary_is_padded_at_its_end_only() -> None:  # case A4
    spec = dataclasses.replace(SPEC, vocab_size=50257)
    assert spec.padded_vocab(4) == 50688
    rows = [plan_stage(FAMILIES["llama"], spec, 4, tp_rank, 1, 0)[0] for tp_rank in range(4)]
    assert [layout.shape[0] for layout in rows] == [12672] * 4
    assert [layout.slices[0].length for layout in rows] == [12672, 12672, 12672, 50257 - 3 * 12672]
    assert hf_shapes(FAMILIES["llama"], spec)["lm_head.weight"] == (50257, 48)


def test_a_rank_with_padding_only_has_no_slice() -> None:
    spec = dataclasses.replace(SPEC, vocab_size=200)
    assert plan_stage(FAMILIES["llama"], spec, 4, 3, 1, 0)[0].slices == ()


def test_layers_are_owned_once_on_uneven_stages() -> None:  # case A12
    for layers, pp, expected in ((30, 4, [8, 8, 7, 7]), (7, 2, [4, 3]), (10, 3, [4, 3, 3])):
        spec = dataclasses.replace(SPEC, num_layers=layers)
        counts = []
        names: list[str] = []
        for stage in range(pp):
            plan = plan_stage(FAMILIES["llama"], spec, 1, 0, pp, stage)
            names += [piece.hf_name for layout in plan for piece in layout.slices if "input_layernorm" in piece.hf_name]
            counts.append(sum("input_layernorm" in layout.name for layout in plan))
        assert counts == expected
        assert names == [f"model.layers.{layer}.input_layernorm.weight" for layer in range(layers)]


def test_a_tied_model_has_its_embedding_twice_only_where_stages_need_it() -> None:  # case A1
    spec = dataclasses.replace(SPEC, is_tied=True)
    assert "output_layer.weight" not in [layout.name for layout in plan_stage(FAMILIES["llama"], spec, 1, 0, 1, 0)]
    last = plan_stage(FAMILIES["llama"], spec, 1, 0, 2, 1)[-1]
    assert last.is_tied_copy and last.slices[0].hf_name == "model.embed_tokens.weight"
    assert "lm_head.weight" not in hf_shapes(FAMILIES["llama"], spec)


@pytest.mark.parametrize("stages", [v_shape(3), reversed_v(3), interleaved(3, 2), reversed_linear(3)])
def test_chunks_hold_every_layer_once_wherever_they_lie(stages: tuple[int, ...]) -> None:
    topology = Topology((0, 1, 2), pp_size=3, chunk_stages=stages)
    held = [plan_rank(FAMILIES["llama"], SPEC, topology, 0, stage) for stage in range(3)]
    names = [[layout.name for layout in layouts] for layouts in held]
    assert all(len(set(each)) == len(each) for each in names), "two chunks of a stage use one name"
    together = sorted(name for each in names for name in each)
    assert together == sorted(layout.name for layout in plan_stage(FAMILIES["llama"], SPEC, 1, 0, 1, 0))
    assert "embedding.word_embeddings.weight" in names[stages[0]] and "output_layer.weight" in names[stages[-1]]


def test_a_critic_has_a_value_head_on_its_last_stage_only() -> None:  # case A2
    spec = dataclasses.replace(SPEC, is_tied=True)
    heads = [
        layout for _, _, layout in all_shards("llama", spec, 2, 2, "value") if layout.name == "output_layer.weight"
    ]
    assert [layout.shape for layout in heads] == [(1, 48)] * 2  # both ranks of the last stage
    assert all(layout.is_replicated and not layout.is_tied_copy for layout in heads)


@pytest.mark.parametrize(("tp", "words"), [(8, "4 key-value heads"), (3, "key-value heads (4)")])
def test_a_grid_that_cuts_heads_is_refused_with_the_numbers(tp: int, words: str) -> None:  # case A5
    with pytest.raises(ValueError, match="tp=") as error:
        check_tp(SPEC, tp)
    assert words in str(error.value)
