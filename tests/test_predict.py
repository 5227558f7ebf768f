"""What the page predicts from a dense run, against the run itself."""

import pytest

from decomoe.answer import ask
from decomoe.methods import DecoMoE, Dense
from decomoe.ui.predict import predict

QUESTION = "Describe the picture."


@pytest.fixture(scope="module")
def dense(mini, image):
    return ask(mini, image, QUESTION, Dense(), max_new_tokens=2, read_gate=True).trace


@pytest.mark.parametrize(
    "method",
    [DecoMoE(theta=theta) for theta in (0.01, 0.1, 0.5, 1.0)]
    + [DecoMoE(exit_after="never"), DecoMoE(exit_after=7, p=0.3), DecoMoE(exit_after=7, p=1)]
    + [DecoMoE(exit_after=4, keep_ratio=0.5, order="native"), DecoMoE(exit_after=4, p=0.9, order="random")],
    ids=str,
)
def test_exit_is_exact_and_prefixes_are_near(mini, image, dense, method):
    found = predict(mini, dense, method)
    true = ask(mini, image, QUESTION, method, max_new_tokens=1).trace
    assert (found.exit_after, found.live, found.theta) == (true.exit_after, true.live, true.theta)
    assert (found.method, found.settings) == (true.method, true.settings)
    pairs = list(zip(found.prefix.prefill, true.prefix.prefill, strict=True))
    if method.p == 1 or method.keep_ratio:
        assert found.prefix.prefill == true.prefix.prefill
    assert all((a or 32) - (b or 32) == 0 for a, b in pairs[: (true.exit_after or 0) + 1])
    assert sum(abs((a or 32) - (b or 32)) for a, b in pairs) / len(pairs) < 2.5


def test_a_dense_run_is_not_changed_by_predicting(mini, dense):
    before = dense.to_json()
    predict(mini, dense, DecoMoE(theta=0.01))
    assert dense.to_json() == before


def test_what_does_not_fit_is_told(mini, dense):
    with pytest.raises(ValueError, match="after layers 0 to 15"):
        predict(mini, dense, DecoMoE(exit_after=40))
    with pytest.raises(ValueError, match="p must be above 0"):
        predict(mini, dense, DecoMoE(p=2))
