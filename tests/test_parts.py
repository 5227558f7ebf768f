"""Layout, prefix, gate features, calibration and trace: each against a value by hand or a plain loop."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_flops import make_trace

from decomoe.calibration import META, TENSORS, Calibration
from decomoe.gate import Gate, text_features
from decomoe.layout import Layout, take, top
from decomoe.prefix import drop, reroute, routed_mass, shortest_prefix, skip
from decomoe.trace import GateReading, Trace

masses = st.lists(st.floats(0, 10, width=32), min_size=4, max_size=16).filter(lambda m: sum(m) > 1e-3)


@given(masses, st.floats(0.01, 0.99), st.integers(1, 4))
@settings(deadline=None)
def test_shortest_prefix_covers_and_is_minimal(mass, share, top_k):
    length = shortest_prefix(torch.tensor([mass], dtype=torch.float64), share, top_k).item()
    total = sum(mass)
    assert top_k <= length <= len(mass)
    assert sum(mass[:length]) >= share * total - 1e-9
    assert length == top_k or sum(mass[: length - 1]) < share * total + 1e-9


def test_shortest_prefix_by_hand():
    mass = torch.tensor([[5.0, 3, 1, 1], [0, 0, 0, 10]], dtype=torch.float64)
    assert shortest_prefix(mass, 0.5, 1).tolist() == [1, 4]
    assert shortest_prefix(mass, 0.8, 1).tolist() == [2, 4]
    assert shortest_prefix(mass, 0.5, 2).tolist() == [2, 4]
    assert shortest_prefix(mass[:, [0, 1]], 1.0, 1).tolist() == [2, 2]  # all of them, although the first covers all


def test_routed_mass_and_routing_by_hand():
    logits = torch.tensor([[4.0, 3, 2, 1]]).log()  # softmax: 0.4 0.3 0.2 0.1
    scores, indices = torch.tensor([[0.4, 0.3]]), torch.tensor([[0, 1]])
    two = torch.stack([torch.tensor([0.4, 0.3]), torch.tensor([0.6, 0.2])])[None]
    routes, both = torch.tensor([[[0, 1], [1, 3]]]), torch.tensor([[True, True]])
    assert routed_mass(two, routes, 4, both).tolist() == [[*map(pytest.approx, (4 / 7, 3 / 7 + 0.75, 0, 0.25))]]
    assert routed_mass(two, routes, 4, torch.tensor([[False, True]])).tolist() == [
        [0, pytest.approx(0.75), 0, pytest.approx(0.25)]
    ]
    inside = torch.tensor([[False, True, False, True]])
    new_scores, new_indices = reroute(logits, inside, 2)
    assert new_indices.tolist() == [[1, 3]]
    assert new_scores.tolist() == [pytest.approx([0.75, 0.25])]
    raw, _ = reroute(logits, torch.tensor([[True, True, True, True]]), 2, normalize=False)
    assert raw.tolist() == [pytest.approx([0.4, 0.3])]
    dropped, where = drop(scores, indices, inside)
    assert where.tolist() == [[4, 1]]
    assert dropped.tolist() == [[0, pytest.approx(0.3)]]
    stay = torch.tensor([[True, False], [True, True]])
    left, where = skip(scores.repeat(2, 1), indices.repeat(2, 1), stay, 4, normalize=True)
    assert where.tolist() == [[0, 4], [0, 1]]
    assert left[0].tolist() == [1, 0]
    assert torch.equal(left[1], scores[0])  # bit for bit


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5).filter(any), min_size=1, max_size=4), st.data())
@settings(deadline=None)
def test_layout_keeps_what_lives_right_aligned(valid, data):
    layout = Layout.full(torch.tensor([[0] * (5 - sum(row)) + [1] * sum(row) for row in valid]))
    alive = torch.tensor([data.draw(st.lists(st.booleans(), min_size=5, max_size=5)) for _ in valid])
    alive[:, -1] = True
    rest, slots = layout.keep(alive)
    for row in range(len(valid)):
        expected = [i for i in range(5) if layout.valid[row, i] and alive[row, i]]
        assert rest.index[row][rest.valid[row]].tolist() == expected
        assert rest.valid[row].int().diff().ge(0).all()  # padding on the left
        states = torch.arange(5.0).expand(len(valid), 5)
        assert take(states, slots, 1)[row][rest.valid[row]].tolist() == expected
    assert rest.valid.sum(1).max() == rest.index.shape[1]


def test_top_by_hand():
    scores = torch.tensor([[0.5, 0.9, 0.5, 0.1], [9.0, 0.2, 0.3, 0.4]])
    among = torch.tensor([[True, True, True, True], [False, True, True, True]])
    assert top(scores, among, torch.tensor([2, 1])).int().tolist() == [[1, 1, 0, 0], [0, 0, 0, 1]]
    assert torch.equal(top(scores, among, torch.tensor([9, 9])), among)
    assert not top(scores, among, torch.tensor([0, 0])).any()


def test_text_features_by_hand():
    hidden = torch.tensor([[[9.0, 9], [1, 2], [8, 8], [3, 4], [5, 6]]])
    text = torch.tensor([[False, True, False, True, True]])
    assert text_features(hidden, text).tolist() == [[2, 3, 5, 6]]
    one = torch.tensor([[False, False, False, False, True]])
    assert text_features(hidden, one).tolist() == [[0, 0, 5, 6]]


def test_text_features_are_taken_where_the_states_are():
    """A model over several devices: which tokens are text is known on the first, the states lie on another."""
    text = torch.tensor([[False, True, True]])
    features = text_features(torch.zeros(1, 3, 2, device="meta"), text)
    assert (features.device.type, features.shape) == ("meta", (1, 4))


def make_artifact():
    orders = torch.stack([torch.randperm(8) for _ in range(3)])
    return Calibration("abc", orders, Gate([1, 2], 4, 16), 0.4, 0.6, provenance={"cases": 3})


def test_calibration_goes_to_disk_and_back(tmp_path):
    artifact = make_artifact()
    artifact.save(tmp_path)
    again = Calibration.load(tmp_path)
    assert torch.equal(again.orders, artifact.orders)
    features = torch.randn(2, 8)
    assert torch.equal(again.gate(2, features), artifact.gate(2, features))
    assert (again.theta, again.p, again.provenance) == (0.4, 0.6, {"cases": 3})
    assert sorted(path.name for path in tmp_path.iterdir()) == [META, TENSORS]


def test_damaged_calibrations_are_refused(tmp_path):
    artifact = make_artifact()
    artifact.orders[1, 0] = artifact.orders[1, 1]
    artifact.save(tmp_path)
    with pytest.raises(ValueError, match="not a permutation"):
        Calibration.load(tmp_path)
    make_artifact().save(tmp_path)
    good = (tmp_path / META).read_text()
    for bad in (json.dumps({**json.loads(good), "schema": 0}), "[]", "{}", "", good.replace('"theta"', '"theat"')):
        (tmp_path / META).write_text(bad)
        with pytest.raises(ValueError, match="calibrate again"):
            Calibration.load(tmp_path)
    (tmp_path / META).write_text(good)
    (tmp_path / TENSORS).write_bytes((tmp_path / TENSORS).read_bytes()[:-7])
    with pytest.raises(ValueError, match="calibrate again"):
        Calibration.load(tmp_path)


def test_halves_of_two_calibrations_are_refused(tmp_path):
    """What a crash between the two renames would leave."""
    make_artifact().save(tmp_path)
    meta = (tmp_path / META).read_text()
    make_artifact().save(tmp_path)
    (tmp_path / META).write_text(meta)
    with pytest.raises(ValueError, match="not one piece"):
        Calibration.load(tmp_path)


def test_trace_goes_to_json_and_back():
    trace = make_trace(451, 50, 28, 35, generated=3)
    trace.gate, trace.answer, trace.question = [GateReading(27, 0.9), GateReading(31, None)], 'a "cat"\n', "wo ist ☂?"
    line = trace.to_json()
    assert "\n" not in line
    assert Trace.from_json(line) == trace
    with pytest.raises(ValueError, match="schema"):
        Trace.from_json(line.replace('"schema": 1', '"schema": 99'))
    with pytest.raises(ValueError):
        Trace.from_json("[]")


def test_mean_prefix_counts_uncut_layers_as_all_experts():
    trace = make_trace(100, 20, exit_after=1, prefix=4, generated=2, layers=4, experts=8, top_k=2)
    assert trace.mean_prefix == 6
