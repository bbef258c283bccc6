"""Tables of plans equal the records in `recorded/plans`, number by number."""

import json
import re

import places
import planned
import pytest

from rlhf_jax.planning import tables
from rlhf_jax.planning.measured import Alive
from rlhf_jax.train.plan import advice

PLANS = places.RECORDED / "plans"
GIB = 2**30
README = (places.ROOT / "rlhf_jax" / "planning" / "README.md").read_text("utf-8")
GRID = (PLANS / "grid.md").read_text("utf-8")
DEVICES = (places.ROOT / "rlhf_jax" / "devices" / "README.md").read_text("utf-8")


def recorded(name):
    return json.loads((PLANS / f"{name}.json").read_text("utf-8"))


def rows():
    """{(model, tokens, chip): row} of the grid; the last row of each key counts."""
    lines = (PLANS / "grid.jsonl").read_text("utf-8").splitlines()
    made = map(json.loads, lines)
    return {tuple(row["cell"].values()): row for row in made}


def table(heading, text):
    """The cells below the heading row that begins with `heading`."""
    [_, after] = text.split(f"\n{heading}")
    lines = after.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_grid_s_table():
    every = rows()
    cells = table("| model, tokens |", GRID)
    assert len(cells) == 8
    for name, *figures in cells:
        model, length = name.split(", ")
        for chip, figure in zip(("v5e", "v5p", "h100"), figures, strict=True):
            row = every[model, length, chip]
            expected = "–"
            if row["fits"]:
                tokens, mfu = row["tokens_per_second_per_chip"], row["mfu"]
                expected = f"{tokens:,.0f} ({mfu:.0%})"
            assert figure == expected, (name, chip)


def test_what_the_readme_says_of_the_grid():
    every = rows()
    bounds = [every["8B", "2k", c] for c in ("v5e", "v5p", "h100")]
    figures = tuple(f"{one['tokens_per_second_per_chip']:,.0f}" for one in bounds)
    text = "the bound is {} tokens per second and chip on v5e, {} on v5p and {} on H100"
    assert text.format(*figures) in README
    long = [row for (_, n, _), row in every.items() if n in ("32k", "128k")]
    shares = [row["shares"]["rollout"] for row in long]
    most = f"the rollout takes {min(shares):.0%} to {max(shares):.0%} of a step"
    assert most in README

    def mfu(gpus, kernels):
        """The lowest and highest MFU of the updates."""
        found = [
            one["mfu"]
            for (_, length, chip), row in every.items()
            for one in row["programs"]
            if one["name"] == "learning" and (chip[0] == "h") == gpus and one["mfu"]
            if kernels(row["attention"], "context" in row["meshes"])
        ]
        return f"{min(found):.0%} to {max(found):.0%}"

    shared = {gpus: mfu(gpus, lambda _, context: context) for gpus in (False, True)}
    assert f"the update has {shared[False]} MFU on TPUs (splash attention)" in README
    assert f"{shared[True]} on GPUs (`blockwise`)" in README
    assert f"cuDNN's kernel has {mfu(True, lambda name, _: name == 'cudnn')}" in README


def test_rows_that_several_devices_share():
    every = rows()
    for place, *cells in table("| tokens, chip |", DEVICES):
        row = every["8B", *place.split(", ")]
        [update] = [one for one in row["programs"] if one["name"] == "learning"]
        assert (row["chips"], row["peak"]["during"]) == (64, "learning")
        assert cells == [
            f"`{row['meshes'].partition(' / ')[0]}`",
            f"{row['rows']}",
            f"{row['peak']['total'] / GIB:.1f} of {row['memory'] / GIB:.1f}",
            f"{update['seconds']['bound']:.1f}",
            f"{update['mfu']:.0%}",
        ]


def turn_of(name):
    """Seconds of a decoded token by a plan."""
    programs = recorded(name)["programs"]
    return next(one["seconds_of_turn"] for one in programs if one["turns"])


def test_adapters_decode_as_fast_as_they_must():
    """8B with LoRA on 8 H100: 1.7 ms per token, latency included."""
    assert turn_of("llama-3.1-8b-lora-h100-1x8")["bound"] < 1.7e-3


def test_64_v5e_sample_as_fast_as_they_must():
    """Llama 2 7B, 512 responses of 512 tokens: 6 s, and not bound by links."""
    programs = recorded("llama-2-7b-v5e-8x8-auto")["programs"]
    [seconds] = [one["seconds"] for one in programs if one["name"] == "sampling"]
    assert seconds["links"] < seconds["memory"]
    assert seconds["bound"] < 6


def test_exchanges_alone_keep_64_h100_from_a_third_of_a_millisecond():
    """8B, 2k: of two sums per layer the latency alone is above 0.35 ms."""
    turn = turn_of("llama-3.1-8b-grpo-2k-h100-8x8")
    least = turn["latency"] * (2 * 32) / turn["exchanges"]
    assert 0.35e-3 < least < turn["bound"]
    assert turn["memory"] < 1.2 * turn["by_hand"]


def test_what_70b_needs_on_256_v5e_for_rows_of_128k():
    """A plan of the recorded size does not fit; with adapters it does."""
    row = rows()["70B", "128k", "v5e"]
    over = row["peak"]["total"] - row["memory"]
    assert not row["fits"]
    assert over > 0
    config, _ = planned.parsed(
        *("grpo", "--topology=v5e:16x16", "--placement.policy=fsdp=4,context=64"),
        *("--dtype=bfloat16", "--remat=full", "--reference-storage.dtype=bfloat16"),
        *("--num-minibatches=4", "--max-new-tokens=130048"),
        path="llama-3.1-70b",
        chip=None,
    )
    lines = advice.advice(config, resident=row["held"], alive=[Alive(**row["peak"])])
    saved = row["held"]["reference"] + row["held"]["policy's optimizer"]
    assert f"--lora 16: about {saved / GIB:.2f} GiB per chip less" in lines
    assert saved > 2 * over  # which leaves room for adapters
    assert lines[0].startswith("--lora 16")


def test_64_h100():
    result = recorded("llama-3.1-8b-grpo-h100-8x8")
    learning = result["programs"][-1]
    shares = (f"{part:.0%}" for part in result["shares"].values())
    turn = next(one["seconds_of_turn"] for one in result["programs"] if one["turns"])
    token = (f"{1e3 * turn[name]:.2f}" for name in ("by_hand", "memory", "bound"))
    mesh = result["sampler"].removeprefix("Sampling on ").partition(":")[0]
    expected = {
        "peak [GiB per GPU, of 60]": f"{result['peak']['total'] / GIB:.1f}",
        f"token on `{mesh}` [ms]: by hand; memory; latency added": "; ".join(token),
        "MFU at the bound: update / step": (
            f"{learning['mfu']:.0%} / {result['mfu']:.1%}"
        ),
        "rollout / score / update [share of the step]": " / ".join(shares),
        "step [s]; tokens per second and GPU": (
            f"{result['seconds']:.1f}; {result['tokens_per_second_per_chip']:,.0f}"
        ),
    }
    assert dict(table("| 64 H100 |", README)) == expected


def test_keys_that_are_passed_round():
    columns = []
    for chips in ("v5p-4x4x4", "h100-8x8"):
        result = recorded(f"llama-3.1-8b-grpo-128k-ring-{chips}")
        assert result["fits"]
        assert (result["attention"], result["tokens"]) == ("ring", 16 * 131_072)
        update = result["programs"][-1]
        columns.append(
            [
                f"{result['peak']['total'] / GIB:.1f}",
                f"{update['seconds']['bound']:.1f}; {update['mfu']:.0%}",
                " / ".join(f"{part:.0%}" for part in result["shares"].values()),
                f"{result['seconds']:.0f}; {result['tokens_per_second_per_chip']:.0f}",
            ]
        )
    cells = table("| 8B, 128k, `ring` |", GRID)
    rows_of_both = [list(row) for row in zip(*columns, strict=True)]
    assert [cell[1:] for cell in cells] == rows_of_both


def test_where_64_v5e_sample():
    seconds = []
    for name in ("", "-auto"):
        result = recorded(f"llama-2-7b-v5e-8x8{name}")
        programs = [one for one in result["programs"] if one["name"] == "sampling"]
        seconds.append(programs[0]["seconds"]["bound"])
    mesh = result["sampler"].removeprefix("Sampling on ").partition(":")[0]
    text = "takes {:.1f} s on the training mesh, bound by links, and {:.1f} s on"
    assert f"{text.format(*seconds)} `{mesh}`, which is chosen." in README


def test_experts_that_a_token_reads():
    """16 rows on data=2,tensor=8: in each of 24 layers a row uses 4 of 32 experts."""
    result = recorded("gpt-oss-20b-grpo-h100-2x8")
    [turn] = [one["seconds_of_turn"] for one in result["programs"] if one["turns"]]
    matrices = 24 * 32 * (1 - (1 - 4 / 32) ** 8) * 3 * 2880**2
    biases = 24 * 32 * (1 - (1 - 4 / 32) ** 8) * 3 * 2880
    expected = 2 * (matrices + biases) / 8
    assert turn["expert_bytes"] == pytest.approx(expected)
    assert f"of 8 rows reads {expected / 1e9:.2f} GB of experts" in README
    assert turn["memory"] < 1.02 * turn["by_hand"]


MIXTURES = (
    "qwen3-30b-a3b-grpo-v5p-4x4x4",
    "qwen3-30b-a3b-grpo-h100-8x8",
)


def test_mixtures():
    columns = []
    for name in MIXTURES:
        result = recorded(name)
        [turn] = [one["seconds_of_turn"] for one in result["programs"] if one["turns"]]
        token = (f"{1e3 * turn[part]:.2f}" for part in ("by_hand", "memory", "bound"))
        mesh = result["sampler"].removeprefix("Sampling on ").partition(":")[0]
        experts = turn.get("expert_bytes")
        peak, most = result["peak"]["total"] / GIB, result["chip"]["memory"] / GIB
        tokens = result["tokens_per_second_per_chip"]
        columns.append(
            [
                f"{peak:.1f} of {most:.1f}",
                f"`{mesh}`",
                "; ".join(token),
                "–" if experts is None else f"{experts / 1e9:.2f}",
                " / ".join(f"{part:.0%}" for part in result["shares"].values()),
                f"{result['seconds']:.1f}; {tokens:,.0f}",
            ]
        )
    cells = table("| Qwen3-30B-A3B, GRPO,", README)
    rows_of_all = [list(row) for row in zip(*columns, strict=True)]
    assert [cell[1:] for cell in cells] == rows_of_all


@pytest.mark.parametrize("name", MIXTURES)
def test_rows_travel_to_their_experts_and_no_weights_of_others(name):
    """A row of 4,096 tokens a chip: of 48 layers of 128 experts a token meets 8."""
    result = recorded(name)
    matrix = 2048 * 768
    data, tensor = (result["sampler_mesh"][axis] for axis in ("data", "tensor"))
    [turn] = [one["seconds_of_turn"] for one in result["programs"] if one["turns"]]
    met = 48 * 128 * (1 - (1 - 8 / 128) ** (64 // data))
    assert turn["expert_bytes"] == pytest.approx(2 * 3 * met * matrix / tensor)
    assert turn["memory"] > turn["expert_bytes"] / result["chip"]["bandwidth"]
    # Two sums per layer, and what is drawn: no row's logits of a router.
    assert 2 * 48 < turn["exchanges"] <= 2 * 48 + 5
    for program, passes in (("the reference", 1), ("learning", 3)):
        [row] = [one for one in result["programs"] if one["name"] == program]
        sent = [one for one in row["collectives"] if one["kind"] == "ragged-all-to-all"]
        [there] = [one for one in sent if one["size"] == 2 * 4096 * 8 * 2048]
        assert (there["devices"], there["times"]) == (8, 2 * 48 * passes)
        # The 16 experts of a device, over those that share these with it.
        # GPUs gather the record of routing too, i32[64, 4096, 48, 8], once.
        gathered = [one for one in row["collectives"] if one["kind"] == "all-gather"]
        sizes = {one["size"] for one in gathered} - {4 * 64 * 4096 * 48 * 8}
        assert max(sizes) <= 2 * 16 * matrix


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama-2-7b-v5e-8x8", "Llama 2 7B takes {:.2f} of {:.2f} GiB on 64 v5e"),
        ("llama-2-7b-v5p-2x2x4", "{:.2f} of {:.2f} on 16 v5p"),
        ("llama-2-70b-full-v5p-2x4x4", "Llama 2 70B {:.1f} on 32 v5p"),
        ("llama-2-70b-lora-v5p-2x2x1", "with adapters {:.1f} on 4"),
        ("gpt-oss-20b-grpo-h100-2x8", "gpt-oss 20B {:.1f} of {:.1f} on 16 H100"),
        ("qwen3.5-4b-grpo-8k-v6e-4x4", "takes {:.1f} of {:.1f} on 16 v6e"),
    ],
)
def test_what_others_take(name, text):
    result = recorded(name)
    peak, most = result["peak"]["total"] / GIB, result["chip"]["memory"] / GIB
    assert re.search(re.escape(text.format(peak, most)), README)


def test_a_hybrid_of_8k_on_16_v6e():
    """GRPO of Qwen3.5-4B, 64 rows, whose sampler reads weights and states once."""
    result = recorded("qwen3.5-4b-grpo-8k-v6e-4x4")
    assert result["fits"]
    assert (result["chips"], result["tokens"]) == (16, 64 * 8192)
    [turn] = [one["seconds_of_turn"] for one in result["programs"] if one["turns"]]
    token, step = 1e3 * turn["bound"], result["seconds"]
    assert f"{token:.2f} ms per token, {step:.1f} s per step" in README
    assert turn["memory"] < 1.2 * turn["by_hand"]
    # Two sums of each of the 32 layers, the embedding, and what is drawn.
    assert turn["exchanges"] <= 2 * 32 + 5


def test_a_plan_of_a_mixture_says_what_its_experts_take(capsys):
    plan = recorded("gpt-oss-20b-grpo-h100-2x8")
    plan["within"]["routing record"] = 3 * 2**20  # --routing-replay
    tables.show(plan)
    text = " ".join(capsys.readouterr().out.split())
    assert "of the temporaries, routing record: 0.00293 GiB" in text
    assert "reading weights (3.14 GB of them experts) and filled cache once" in text
