"""Tables of experiments/README.md equal the records in `recorded/`."""

import json
import re

import numpy as np
import places
import pytest
from scipy import stats
from studies.regularisers import page

README = (places.EXPERIMENTS / "README.md").read_text(encoding="utf-8")
CHOICES = places.RECORDED.joinpath("kl_in_practice", "choices.md").read_text("utf-8")
KLS = ("kl", "kl_to_go", "ema", "mixture")
DATA = places.ROOT / "rlhf_jax" / "data" / "README.md"
REPORTS = places.ROOT / "rlhf_jax" / "reports" / "README.md"
VERIFICATION = places.ROOT / "rlhf_jax" / "verification" / "README.md"
GENERATION = places.ROOT / "rlhf_jax" / "models" / "generation" / "README.md"


def recorded(*names):
    return json.loads(places.RECORDED.joinpath(*names).read_text(encoding="utf-8"))


def table(heading, *, text=README):
    """The cells below the heading row that begins with `heading`."""
    [_, after] = text.split(f"\n{heading}")
    rows = after.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" *") for cell in row.split("|")[1:-1]] for row in rows]


def check(cell, *values):
    """Compares each number of a cell, rounded to the cell's digits."""
    numbers = cell.replace("−", "-").replace("±", " ").replace(" to ", " ").split()
    assert len(numbers) == len(values), cell
    for number, value in zip(numbers, values, strict=True):
        half = 0.5 * 10.0 ** -len(number.partition(".")[2])
        assert float(number) == pytest.approx(value, abs=half * 1.0001), cell


def test_a_wrong_number_is_seen():
    check("−0.28 ±0.79", -0.2751, 0.794)
    for wrong in ("0.28 ±0.79", "−0.27 ±0.79", "−0.28 ±0.80"):
        with pytest.raises(AssertionError):
            check(wrong, -0.2751, 0.794)
    with pytest.raises(AssertionError, match=r"0\.28"):
        check("0.28", 0.28, 0.79)


def test_staleness():
    columns = [("large_steps", 0.2), ("large_steps", 0.8)]
    columns += [("small_steps", 0.2), ("small_steps", 0.8)]
    cells = {
        (steps, cell["sampler"], cell["kl_coef"]): cell["gold"]
        for steps in ("large_steps", "small_steps")
        for cell in recorded("staleness", steps, "figures.json")["cells"]
    }
    rows = table("| sampler | 1e-3, β = 0.2 |")
    assert len(rows) == 6
    for name, *shown_cells in rows:
        sampler = name.replace("truncated", "truncate")
        for (steps, kl_coef), cell in zip(columns, shown_cells, strict=True):
            gold = cells[steps, sampler, kl_coef]
            low, high = gold["interval"]
            check(cell, gold["mean"], (high - low) / 2)


def test_what_older_samples_cost_at_large_steps():
    claims = recorded("staleness", "large_steps", "claims.json")
    for kl_coef, cell in {
        0.05: "0.47 ± 0.99",
        0.2: "0.89 ± 0.79",
        0.8: "0.67 ± 0.75",
    }.items():
        claim = claims[f"4 behind, corrected, is within 0.1, β = {kl_coef}"]
        low, high = claim["interval"]
        check(cell, 0.1 - claim["difference"], (high - low) / 2)
        assert cell in README
        assert (high < 0.1) == (kl_coef == 0.2)  # of the difference without the 0.1
    claim = claims["4 behind, truncation beats no correction, β = 0.2"]
    low, high = claim["interval"]
    check("0.81 ± 0.81", -claim["difference"], (high - low) / 2)


def test_episodes_beside_whole_conversations():
    turns = recorded("benchmark_turns", "record.json")["turns"]
    text = GENERATION.read_text(encoding="utf-8")
    rows = table("| seconds of a tool |", text=text)
    assert len(rows) == 3
    for (latency, speeds, shares), episodes, whole in zip(
        rows, turns[::2], turns[1::2], strict=True
    ):
        assert (episodes["loop"], whole["loop"]) == ("episodes", "whole")
        check(latency, episodes["latency"])
        for cell, name in ((speeds, "tokens_per_second"), (shares, "waiting_share")):
            check(cell.replace(",", " "), episodes[name], whole[name])
    ran = [row["run_per_sampled"] for row in turns[:2]]
    assert [round(seconds, 1) for seconds in ran] == [5.4, 13.3]


def test_reading():
    stages = {
        row["stage"]: row
        for row in recorded("benchmark_reading", "record.json")["rows"]
    }
    text = DATA.read_text(encoding="utf-8")
    # 10 times the rows: the time is linear
    assert all(stage["ratio_per_row"] < 2 for stage in stages.values())
    told = re.search(
        r"linear in the rows: of 200,000, reading prompts takes (\S+) CPU seconds, "
        r"encoding demonstrations (\S+) and preferences (\S+)\s",
        text,
    )
    assert told is not None
    names = ("read prompts", "encode demonstrations", "encode preferences")
    for cell, name in zip(told.groups(), names, strict=True):
        assert stages[name]["sizes"][-1] == 200_000
        check(cell, stages[name]["seconds"][-1])


def test_verifier():
    rows = recorded("benchmark_verifier", "record.json")["rows"]
    large = [row["ratio"] for row in rows if row["value"] == "large integers"]
    others = [row["ratio"] for row in rows if row["value"] != "large integers"]
    told = re.search(
        r"take (\S+) to (\S+) of the CPU time .* 64 bits up to (\S+) \(",
        VERIFICATION.read_text(encoding="utf-8"),
    )
    assert told is not None
    for cell, ratio in zip(
        told.groups(), (min(others), max(others), max(large)), strict=True
    ):
        check(cell, ratio)
    for row in rows:
        assert row["ratio"] == pytest.approx(row["now"] / row["before"], abs=0.01)


def test_load():
    cases = {
        row["case"]: row for row in recorded("benchmark_load", "record.json")["rows"]
    }
    text = REPORTS.read_text(encoding="utf-8")
    told = re.search(
        r"10,000 runs take (\S+) CPU seconds and (\S+) GB, a million rows (\S+) and "
        r"(\S+) \(",
        text,
    )
    assert told is not None
    names = ("10,000 runs", "1,000,000 rows")
    for name, (seconds, gb) in zip(
        names, (told.groups()[:2], told.groups()[2:]), strict=True
    ):
        check(seconds, cases[f"{name}, report"]["seconds"])
        check(gb, cases[f"{name}, report"]["mb"] / 1000)
    prompts = cases["200,000 prompts"]
    shown = f"take {prompts['seconds']} CPU seconds and {prompts['mb']} MB"
    assert shown in DATA.read_text(encoding="utf-8")


def test_asynchrony():
    rows = recorded("asynchrony", "slow_verifiers.json")["figures"]
    for shown_cells, row in zip(
        table("| steps behind | seconds | ratio to on-policy |"), rows, strict=True
    ):
        names = ("staleness", "seconds", "ratio")
        for cell, name in zip(shown_cells, names, strict=True):
            check(cell, row[name])
    _, *others = recorded("asynchrony", "no_latency.json")["figures"]
    assert [round(row["ratio"], 2) for row in others] == [1.17, 1.11]
    assert "the ratios are 1.17 and 1.11" in README


def test_samplers_outside_of_the_trainer():
    every = recorded("outside_sampler", "record.json")["rows"]
    rows = table("| sampler, steps behind |")
    assert len(rows) == 4
    processes = [run for run in every if run["sampler"] == "process"]
    assert len(processes) == 6
    assert all(run["equal_bits"] for run in processes)
    for name, *shown_cells in rows:
        way, behind = name.replace("vLLM", "server").split(", ")
        runs = [
            run
            for run in every
            if run["sampler"] == way and run["behind"] == int(behind)
        ]
        assert len(runs) == 3
        for cell, key in zip(shown_cells, ("score", "right"), strict=False):
            values = [run[key] for run in runs]
            check(cell, np.mean(values), np.std(values))
        if way == "server":
            values = [run["hand_over_seconds"] for run in runs]
            check(shown_cells[2], min(values), max(values))
    largest = max(
        run.get("largest_distance", 0.0) for run in every if run["sampler"] == "server"
    )
    assert largest < 1.5e-6


def half_of_interval(values):
    """Half the width of the 95% interval over seeds."""
    error = np.std(values, ddof=1) / len(values) ** 0.5
    return stats.t.ppf(0.975, len(values) - 1) * error


def test_every_choice_of_the_kl():
    rows = table("| choice | expected gradient | language, PPO: gold |", text=CHOICES)
    assert len(rows) == 18
    # The README has those of the reverse KL but k2 in the reward, in language.
    shorter = [row[:6] for row in rows[:9] if row[0] != "k2 reward"]
    assert table("| choice | expected gradient | PPO: gold |") == shorter
    columns = [
        (world, algorithm, measure)
        for world in ("language", "arithmetic")
        for algorithm in ("ppo", "grpo")
        for measure in ("gold", "kl")
    ]
    cells = {
        (world, cell["algorithm"], cell["choice"], cell["kl_coef"]): cell["by_seed"]
        for world in ("language", "arithmetic")
        for cell in recorded("kl_in_practice", world, "figures.json")["cells"].values()
    }
    for name, _, *shown_cells in rows:
        choice = "none" if name.startswith("none") else name
        for (world, algorithm, measure), cell in zip(columns, shown_cells, strict=True):
            kl_coef = {"language": 0.2, "arithmetic": 0.05}[world]
            kl_coef = 0.0 if choice == "none" else kl_coef
            by_seed = cells[world, algorithm, choice, kl_coef][measure]
            values = [*by_seed.values()]
            check(cell, np.mean(values), half_of_interval(values))


def test_what_the_field_has_published():
    shown = {"yes": "yes", "no": "no", "not enough seeds": "–"}
    rows = table("| claim | language, PPO | GRPO |", text=CHOICES)
    in_short = table("| claim | yes | no | – |")
    for (_, *answers), (_, *counts) in zip(rows, in_short, strict=True):
        every = " ".join(answers).split()
        assert counts == [str(every.count(kind)) for kind in ("yes", "no", "–")]
    for (claim, *shown_cells), (short, *_) in zip(rows, in_short, strict=True):
        first_author = claim.rpartition("(")[2].split()[0]
        assert first_author in short
        runs = [
            (world, algorithm)
            for world in ("language", "arithmetic")
            for algorithm in ("ppo", "grpo")
        ]
        for (world, algorithm), cell in zip(runs, shown_cells, strict=True):
            answers = recorded("kl_in_practice", world, "claims.json")
            betas = {"language": (0.05, 0.2, 0.8), "arithmetic": (0.01, 0.05, 0.2)}
            names = [
                f"{claim.removesuffix(')')}; {algorithm}, β = {beta:g})"
                for beta in betas[world]
            ]
            recorded_answers = [
                answers[name]["answer"] for name in names if name in answers
            ]
            assert cell.split() == [shown[answer] for answer in recorded_answers], claim


def test_several_turns_are_certified():
    summary = recorded("certify_turns", "record.json")["summary"]
    assert summary["failed"] == []
    [row] = [row for row in table("| certificates |") if "certify_turns" in row[0]]
    assert f"), {summary['certificates']}: " in row[0]
    of_rows = [[], [], [], []]
    for finding in summary["findings"]:
        if finding["share"] is None:
            of_rows[3].append(finding["error"])
        else:
            number = 2 if "discount" in finding["name"] else int(finding["share"] < 1)
            of_rows[number].append(finding["error"])
    within, _, observed = row[1].partition("; ")
    for number, errors in zip(within.split(", "), of_rows[:3], strict=True):
        assert max(errors) <= float(number)
    assert observed.startswith("0.34 to 22 with observed tokens")
    assert [f"{error:.2g}" for error in (min(of_rows[3]), max(of_rows[3]))] == [
        *("0.34", "22")
    ]


# --- SmolLM2 ----------------------------------------------------------------------


def check_interval(cell, estimate):
    """Compares a mean with its interval; a mean alone has an interval of width 0."""
    ends = estimate["interval"] if "(" in cell else []
    check(cell.replace("(", "").replace(")", ""), estimate["mean"], *ends)


@pytest.mark.parametrize(("name", "first"), [("smollm2_sums", 1), ("smollm2_gsm8k", 4)])
def test_verifiable_rewards(name, first):
    cells = recorded(name, "record.json")["results"]["cells"]
    before, *after = table("| | sums: pass@1 |")
    assert (before[0], len(after)) == ("before", len(cells))
    for row in after:
        trainer, k = row[0].lower().split(", ")
        cell = cells[f"trainer={trainer},value_estimator={k}"]
        for number, measure in enumerate(("pass_1", "format", "kl"), start=first):
            check_interval(row[number], cell[measure]["estimate"])
            if measure == "kl":
                assert before[number] == ""
            else:  # all start from one model, on the same draws
                check_interval(before[number], cell[f"{measure}_before"]["estimate"])


def test_what_is_said_of_verifiable_rewards():
    sums, questions = (
        recorded(name, "record.json")["results"]["cells"]
        for name in ("smollm2_sums", "smollm2_gsm8k")
    )

    def mean(cell, measure):
        return cell[measure]["estimate"]["mean"]

    first = next(iter(sums.values()))
    check("0.37", mean(first, "pass_1_before") / mean(first, "format_before"))
    check("0.63", mean(first, "pass_8_before"))
    solved = [mean(cell, "pass_8") for cell in sums.values()]
    check("0.85 to 0.89", min(solved), max(solved))
    right_before = mean(next(iter(questions.values())), "arithmetic_before")
    right_after = [mean(cell, "arithmetic") for cell in questions.values()]
    check("0.08", right_before)
    check("0.06 to 0.07", min(right_after), max(right_after))
    right = [mean(cell, "pass_1") / mean(cell, "format") for cell in sums.values()]
    check("0.67 to 0.75", min(right), max(right))
    for trainer, ratio in (("ppo", "5.2"), ("grpo", "2.8")):
        k1, k3 = (
            questions[f"trainer={trainer},value_estimator={k}"] for k in ("k1", "k3")
        )
        check(ratio, mean(k3, "kl") / mean(k1, "kl"))
        for measure in ("kl", "format"):
            k1_high = k1[measure]["estimate"]["interval"][1]
            assert k1_high < k3[measure]["estimate"]["interval"][0]
    for cell in questions.values():
        assert mean(cell, "arithmetic") < mean(cell, "arithmetic_before")
        of_form = [
            0.1
            * mean(cell, f"format{when}")
            / (0.1 * mean(cell, f"format{when}") + mean(cell, f"pass_1{when}"))
            for when in ("_before", "")
        ]
        assert 0.78 < of_form[0] < of_form[1]
    claims = recorded("smollm2_gsm8k", "record.json")["results"]["claims"]
    arithmetic = claims["GRPO learns the arithmetic"]
    assert arithmetic["answer"] == "no"
    check(
        "-0.024 to -0.044 to -0.003", arithmetic["difference"], *arithmetic["interval"]
    )
    claim = recorded("smollm2_sums", "record.json")["results"]["claims"]
    ahead = claim["PPO is ahead of GRPO with k1"]
    check("0.09 to -0.00 to 0.17", ahead["difference"], *ahead["interval"])
    assert ahead["answer"] == "not enough seeds"


PREFERENCES = {
    **{
        f"PPO, β = {beta}, {words}": f"ppo/kl_coef={beta},parameters={parameters}"
        for beta in ("0", "0.1")
        for parameters, words in (("all", "all parameters"), ("lora", "LoRA"))
    },
    "DPO, all parameters": "dpo/parameters=all",
    "DPO, LoRA": "dpo/parameters=lora",
    "best of 8": "best of 8",
}


def test_preferences():
    policies = recorded("smollm2_preferences", "figures.json")["policies"]
    columns = ["kl", "proxy_gain", "judge_gain"]
    rows = table("| policy | KL [nats per response] | proxy |")
    assert [name for name, *_ in rows] == list(PREFERENCES)
    for name, *shown in rows:
        for cell, column in zip(shown, columns, strict=True):
            check_interval(cell, policies[PREFERENCES[name]][column])


def test_what_is_said_of_preferences():
    figures = recorded("smollm2_preferences", "figures.json")
    for name, measured in figures["policies"].items():
        if name.startswith(("ppo", "dpo")):
            for key in ("proxy_gain", "judge_gain", "shakespeare", "gsm8k"):
                low, high = measured[key]["interval"]
                assert low < 0 < high, (name, key)
            assert set(measured["distinct"]["of_seeds"]) == {1.0}
    cut, ended = (figures["of_reference"][kind] for kind in ("cut", "ended"))
    assert (cut["responses"], ended["responses"]) == (1353, 183)
    check("-0.01 to 0.12", cut["correlation"], ended["correlation"])
    check("0.88", 1353 / (1353 + 183))
    record = recorded("smollm2_preferences", "record.json")
    accuracy = record["accuracy"]
    for cell, share in {
        "0.66 0.60 0.71": accuracy["accuracy"]["proxy"],
        "0.61 0.55 0.66": accuracy["accuracy"]["judge"],
        "0.81 0.76 0.85": accuracy["agreement"],
    }.items():
        check(cell, share["mean"], share["low"], share["high"])
    check("0.76", accuracy["correlation"])
    assert {
        claim["answer"] for claim in record["results"]["ppo"]["claims"].values()
    } == {"not enough seeds"}
    counts = record["data"]
    assert [counts[part]["pairs"] for part in ("proxy", "judge", "held_out")] == [
        *(663, 515, 286)
    ]


def test_speed_on_a_real_model():
    record = recorded("benchmark_pretrained", "record.json")
    participants = record["grpo"]["participants"], record["ppo"]["participants"]
    rows = table("| | step [s] | warm start [s] |")
    every = [each for of in participants for each in of.values()]
    assert len(rows) == len(every)
    for (_, step, warm, cold, peak), each in zip(rows, every, strict=True):
        for cell, key in ((step, "step"), (warm, "start"), (peak, "peak")):
            numbers = [line[key] for line in each["rounds"]]
            expected = np.median(numbers), min(numbers), max(numbers)
            check(cell.replace("(", "").replace(")", ""), *expected)
        check(cold, each["cold"])
    for (ours, *_, theirs), told in zip(
        (list(of.values()) for of in participants),
        (("0.27 0.27 0.27", "0.59", "0.94"), ("0.93 0.79 1.00", "0.58", "2.1")),
        strict=True,
    ):
        pairs = [*zip(ours["rounds"], theirs["rounds"], strict=True)]
        steps = [one["step"] / other["step"] for one, other in pairs]
        check(told[0], np.median(steps), min(steps), max(steps))
        check(told[1], np.median([one["peak"] / other["peak"] for one, other in pairs]))
        check(told[2], ours["cold"] / theirs["cold"])
    first = record["grpo"]["participants"]
    pairs = zip(
        first["rlhf_jax, packed"]["rounds"], first["trl"]["rounds"], strict=True
    )
    starts = [one["start"] / other["start"] for one, other in pairs]
    check("0.61 0.54 0.68", np.median(starts), min(starts), max(starts))


def test_starts_with_uneven_lengths():
    record = recorded("uneven_lengths", "medium.json")["workloads"]["medium"]
    runs = record["participants"]
    path = places.ROOT / "rlhf_jax" / "planning" / "README.md"
    told = re.search(
        r"takes (\S+) s cold and (\S+) s warm packed, (\S+) and (\S+) s padded, "
        r"(\S+) and (\S+) s in TRL; peaks are (\S+), (\S+) and (\S+) MiB",
        path.read_text(encoding="utf-8"),
    )
    assert told is not None
    seconds, peaks = iter(told.groups()[:6]), iter(told.groups()[6:])
    for name in ("rlhf_jax", "rlhf_jax, padded", "trl"):
        run = runs[name]
        for start in (run["cold"], run["start"]):
            check(next(seconds), start["start_up"] + start["warm_up"][0])
        check(next(peaks), run["start"]["peak_bytes"] / 2**20)


def test_regularisers():
    """Checks the review language's table, and the page that its program writes."""
    figures = {
        world: recorded("regularisers", world, "figures.json") for world in page.WORLDS
    }
    written = places.RECORDED.joinpath("regularisers", "page.md").read_text("utf-8")
    assert written == "\n".join(page.lines(figures))
    cells = figures["language"]["cells"]
    ends = [cells[name]["end"]["gold"]["mean"] for name in KLS]
    check("0.45 to 0.56", min(ends), max(ends))
    [flat] = [
        row
        for row in figures["language"]["claims"]
        if row["says"] == "and than no KL, at equal proxy"
    ]
    check("0.41 0.07 to 0.75", flat["difference"], *flat["interval"])
    of_sums = figures["arithmetic"]["cells"]
    held = [of_sums[name]["end"]["gold"]["mean"] for name in KLS]
    check("0.32 to 0.35", min(held), max(held))
    low, high = of_sums["none"]["end"]["gold"]["interval"]
    check("0.25 ± 0.15", of_sums["none"]["end"]["gold"]["mean"], (high - low) / 2)
