"""A gate on compiled programs of two layers of real width: no waste (slow).

`programs/gate.py` names wasteful instructions; the bytes of a decoded token are
compared with weights and cache, counted by hand from the models' published sizes.
"""

import importlib.util
import itertools

import gate
import pytest
from test_targets import played

from rlhf_jax.planning import gpu_targets

pytestmark = pytest.mark.slow

H100, V5E, V6E = "h100:1x8", "v5e:2x4", "v6e:2x4"
MESHES = "fsdp=8", "fsdp=4,tensor=2", "data=8"
LORA = "--lora=rank=16"
PROGRAMS = "sampling", "the reference", "learning"
# Width, of queries, of keys, of the MLP, vocabulary.
SIZES = {
    "8B": (4096, 4096, 1024, 14_336, 128_256),
    "1.5B": (1536, 1536, 256, 8960, 151_936),
}
# The chips that decode together, by `train/rollouts/fastest.py`: no more than heads of
# keys, and fewer where the latency of sums outweighs what is read.
TOGETHER = {"8B": 8, "1.5B": 2}
FEW = 4  # exchanges of [B] for a token: of tokens drawn, of rows that have stopped


def cases():
    """Every chip, model, mesh and way to train; all but two are marked long."""
    quick = {(H100, "8B", "fsdp=8", None), (H100, "8B", "fsdp=4,tensor=2", LORA)}
    for case in itertools.product([H100, V5E, V6E], SIZES, MESHES, [None, LORA]):
        if case == (V5E, "8B", "data=8", None):
            continue  # its 23 GB of parameters, moments and gradients
        if case[0] == H100:
            missing, extra = gpu_targets.compiler() is None, "plan-cuda"
        else:
            missing, extra = importlib.util.find_spec("libtpu") is None, "plan"
        marks = [pytest.mark.skipif(missing, reason=f"the extra {extra} is missing")]
        marks += [] if case in quick else [pytest.mark.long]
        name = "-".join(part for part in case if part)
        yield pytest.param(case, marks=marks, id=name)


@pytest.fixture(scope="module", params=cases())
def compiled(request):
    topology, size, mesh, lora = request.param
    words = () if lora is None else (lora,)
    found = played(gate, topology, size, mesh, *PROGRAMS, "--", *words)
    return request.param, found


def floor(size, *, lora, data, tensor):
    """Bytes per token on a chip: bfloat16 weights once and the filled cache once."""
    width, queries, keys, mlp, vocab = SIZES[size]
    linear = [(width, queries), (width, keys), (width, keys), (queries, width)]
    linear += [(width, mlp), (width, mlp), (mlp, width)]
    numbers = gate.LAYERS * sum(ins * outs for ins, outs in linear) + vocab * width
    if lora is not None:
        numbers += gate.LAYERS * sum(16 * (ins + outs) for ins, outs in linear)
    cache = gate.LAYERS * 2 * keys * (gate.ROWS // data) * (gate.PROMPT + gate.NEW)
    return 2 * (numbers + cache) / tensor


def test_a_token_reads_weights_and_cache_once(compiled):
    (_, size, _, lora), found = compiled
    layout = found["layout"]
    tensor = TOGETHER[size] if f"tensor={TOGETHER[size]}" in layout else 1
    least = floor(size, lora=lora, data=8 // tensor, tensor=tensor)
    # A TPU keeps some of them on the chip from token to token.
    kept = found["sampling"]["kept"][-1]
    assert 0.95 * least - kept < found["sampling"]["bytes"] < 1.2 * least


def test_a_token_exchanges_what_its_layers_sum(compiled):
    """Two sums per layer, one of the embedding, the logits, and the sampled tokens."""
    (_, size, _, _), found = compiled
    together = f"tensor={TOGETHER[size]}" in found["layout"]
    least = 2 * gate.LAYERS + 2 if together else 0
    assert least <= found["sampling"]["seconds"]["exchanges"] <= least + FEW


def test_weights_stay_where_they_are_from_token_to_token(compiled):
    _, found = compiled
    assert found["sampling"]["loops"] > 0
    # Else nothing would be looked at: the loops carry the weights.
    assert min(found["sampling"]["constants"]) > 2**26
    assert found["sampling"]["moved weights"] == []


def test_no_logits_are_summed_whole_for_a_token(compiled):
    _, found = compiled
    assert found["sampling"]["summed logits"] == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_program_has_float32_logits_of_whole_rows(compiled, program):
    _, found = compiled
    assert found[program]["float32 logits"] == []


def test_the_whole_state_is_donated(compiled):
    _, found = compiled
    assert found["learning"]["donated"] >= found["learning"]["state"] > 2**20


def test_gradients_are_summed_to_their_shares(compiled):
    _, found = compiled
    assert found["learning"]["summed gradients"] == []


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the extra plan is missing"
)
def test_a_token_of_a_hybrid_exchanges_what_its_layers_sum():
    """A DeltaNet and attention of Qwen3.5-4B, on `tensor=4`."""
    mesh = "--placement.sampler=data=2,tensor=4"
    found = played(gate, V6E, "hybrid", "fsdp=8", "sampling", "--", mesh)["sampling"]
    least = 2 * gate.LAYERS + 2
    assert least <= found["seconds"]["exchanges"] <= least + FEW
    assert found["moved weights"] == found["summed logits"] == []
