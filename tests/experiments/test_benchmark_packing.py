"""`experiments/benchmarks/packing.py` at toy size: packed and padded updates agree."""

import re

import pytest
from benchmarks import packing

pytestmark = pytest.mark.slow


@pytest.mark.long
@pytest.mark.parametrize("equal", [False, True])
def test_the_ratio_is_told_and_the_results_are_the_same(equal, capsys):
    packing.main(
        packing.Config(
            rows=16,
            prompt_length=4,
            response_length=12,
            vocab_size=16,
            hidden_size=64,
            num_layers=1,
            num_minibatches=2,
            rounds=1,
            iterations=20,
            equal=equal,
        )
    )
    printed = capsys.readouterr().out
    apart = float(re.search(r"largest difference (\S+) of", printed).group(1))
    assert apart == 0 if equal else apart < 1e-4
    used = re.findall(r"(padded|batch|minibatch) (\d): (\d+)", printed)
    assert ("padded", "0", "20") in used if equal else len(used) > 2
    sizes = [name for name, *_ in used]
    assert max(sizes.count("batch"), sizes.count("minibatch")) <= 5
