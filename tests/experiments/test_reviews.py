"""The review language: membership, probability, the judge and the labels."""

import math

import numpy as np
import pytest
from worlds import reviews


def words(text):
    return (*text.split(), "<eos>")


MUG = words("review : the blue mug from my aunt .")[:-1]
BIKES = words("review : the bikes on sale .")[:-1]


@pytest.fixture(scope="module")
def sampled():
    return reviews.sample_reviews(0, 2000)


def test_vocabulary_has_no_gaps_and_a_few_hundred_words(sampled):
    assert reviews.VOCABULARY[reviews.PAD_ID] == "<pad>"
    assert reviews.VOCABULARY[reviews.EOS_ID] == "<eos>"
    assert 200 <= len(reviews.VOCABULARY) <= 400
    assert len(set(reviews.VOCABULARY)) == len(reviews.VOCABULARY)
    prompt, response = sampled[0]
    assert reviews.decode(reviews.encode((*prompt, *response))) == (*prompt, *response)
    with pytest.raises(KeyError, match="zebra"):
        reviews.encode(["zebra"])


def test_prompts_are_many_split_and_of_several_lengths():
    train, held_out = set(reviews.TRAIN_PROMPTS), set(reviews.HELD_OUT_PROMPTS)
    assert len(train) == len(reviews.TRAIN_PROMPTS) == 5832
    assert len(held_out) == 648
    assert not train & held_out
    assert {len(prompt) for prompt in held_out} == {5, 6, 7, 8, 9, 10, 11}
    assert MUG in train | held_out


@pytest.mark.slow
def test_every_sample_parses_and_has_4_to_24_words(sampled):
    assert all(reviews.parses(prompt, response) for prompt, response in sampled)
    lengths = [len(response) - 1 for _, response in sampled]
    assert min(lengths) == 4
    assert 20 < max(lengths) <= 24
    assert len({response for _, response in sampled}) > 1950


def test_samples_are_a_function_of_the_seed(sampled):
    assert reviews.sample_reviews(0, 50) == sampled[:50]
    assert reviews.sample_reviews(1, 50) != sampled[:50]
    held_out = reviews.HELD_OUT_PROMPTS[:3]
    drawn = reviews.sample_reviews(0, 50, prompts=held_out)
    assert {prompt for prompt, _ in drawn} == set(held_out)


@pytest.mark.parametrize(
    ("prompt", "good", "broken"),
    [
        (MUG, "it is an awful gift .", "it is a awful gift ."),
        (MUG, "it is a superb gift .", "it is an superb gift ."),
        (MUG, "it is a superb gift .", "they are superb gifts ."),
        (BIKES, "they are superb gifts .", "they are a superb gifts ."),
        (BIKES, "they work well .", "they works well ."),
        (BIKES, "they are superb .", "it is superb ."),
        (BIKES, "the joints are weak .", "the joints is weak ."),
        (BIKES, "the joints are weak .", "the bikes are weak ."),
        (MUG, "my boss loves it .", "my boss love it ."),
        (MUG, "my kids love it .", "my kids loves it ."),
        (MUG, "it is fine but i hate it .", "it is fine but i bought it today ."),
        (MUG, "it is fine and i like it .", "it is fine and i like ."),
        (MUG, "it is good . it is fine .", "it is good . it is good ."),
        (MUG, "we tried it today . we like it .", "we tried it today . we like it"),
        (MUG, "we like it . i love it .", "we tried it today . i tried it today ."),
        (MUG, "it is very poor .", "it is very very poor ."),
        (MUG, "i enjoy it .", "superb superb superb superb ."),
        (MUG, "i enjoy it .", ""),
    ],
)
def test_the_parser_knows_the_rules(prompt, good, broken):
    assert reviews.parses(prompt, words(good))
    assert not reviews.parses(prompt, words(broken))


def test_a_response_must_end_once_and_follow_a_prompt():
    assert not reviews.parses(MUG, words("i enjoy it .")[:-1])
    assert not reviews.parses(MUG, words("i enjoy it . <eos>"))
    assert not reviews.parses(MUG, words("i enjoy it . <pad>"))
    assert not reviews.parses(MUG, ())
    assert not reviews.parses(MUG[:-1], words("i enjoy it ."))


@pytest.mark.slow
def test_corrupted_reviews_rarely_parse(sampled):
    rng = np.random.default_rng(0)
    survivors = {"replaced": 0, "dropped": 0, "swapped": 0}
    for prompt, response in sampled:
        i = rng.integers(len(response) - 2)
        other = reviews.VOCABULARY[rng.integers(len(reviews.VOCABULARY))]
        head, (word, after), tail = response[:i], response[i : i + 2], response[i + 2 :]
        for kind, corrupted in (
            ("replaced", (*head, other, after, *tail)),
            ("dropped", (*head, after, *tail)),
            ("swapped", (*head, after, word, *tail)),
        ):
            same = corrupted == response
            survivors[kind] += not same and reviews.parses(prompt, corrupted)
    share = {kind: count / len(sampled) for kind, count in survivors.items()}
    assert share["replaced"] < 0.04
    assert share["dropped"] < 0.1  # "very" may go
    assert share["swapped"] < 0.01


def test_logprob_by_hand():
    # SIMPLE alone 2/26; good 1/2; PEOPLE VERB OBJECT 2/12; "i" 1/5; "love" is one of
    # two strong verbs of weight 1/2 beside two mild ones of weight 1.
    sentence = 1 / 2 * 2 / 12 * 1 / 5 * (0.5 / 3)
    one = reviews.logprob(MUG, words("i love it ."))
    assert one == pytest.approx(math.log(2 / 26 * sentence))
    # After "love", "adore" has 0.5 of the 2.5 that are left; three times as likely.
    again = 1 / 2 * 2 / 12 * 1 / 5 * (0.5 / 2.5)
    two = reviews.logprob(MUG, words("i love it . we adore it ."))
    assert two == pytest.approx(math.log(4 / 26 * sentence * again))
    assert reviews.logprob(MUG, words("i love it . we love it .")) == -math.inf


@pytest.mark.slow
def test_logprob_agrees_with_the_sampler():
    prompts = [MUG]
    drawn = [r for _, r in reviews.sample_reviews(3, 20000, prompts=prompts)]
    for text in ("it is good .", "i like it .", "my kids enjoy it ."):
        expected = math.exp(reviews.logprob(MUG, words(text)))
        spread = math.sqrt(expected / len(drawn))
        assert drawn.count(words(text)) / len(drawn) == pytest.approx(
            expected, abs=4 * spread
        )


def test_gold_by_hand():
    # Σ = 2, n = 4; repetition adds length only; <eos> is free.
    assert reviews.gold(words("i love it .")) == pytest.approx(0.0353454)
    assert reviews.gold(words("i love it .")[:-1]) == pytest.approx(0.0353454)
    assert reviews.gold(["superb"] * 12) == pytest.approx(0.9242343)
    assert reviews.gold(["superb"] * 18) == pytest.approx(0.4242343)
    assert reviews.gold(words("it is poor but they are awful")) < -1


def test_gold_spreads_over_the_language_and_is_balanced(sampled):
    gold = np.array([reviews.gold(response) for _, response in sampled])
    assert 0.8 < gold.std() < 1.1
    assert abs(gold.mean()) < 0.35
    grades = [sum(reviews.GRADES.get(w, 0) for w in set(r)) for _, r in sampled]
    assert abs(np.mean(grades)) < 0.15


def test_gold_leaves_room_within_a_few_nats(sampled):
    """Estimates the optimum at β, π ∝ π_ref exp(gold / β), on samples of π_ref."""
    gold = np.array([reviews.gold(response) for _, response in sampled])
    weights = np.exp(gold / 0.2)
    weights /= weights.sum()
    rise = (weights @ gold - gold.mean()) / gold.std()
    kl = weights @ np.log(weights * len(weights))
    assert rise > 1.5
    assert 1 < kl < 4


def test_labels_follow_bradley_terry():
    a, b = np.full(20000, 1.5), np.full(20000, 0.5)
    labels = reviews.noisy_preferences(np.random.default_rng(0), a, b, 0.5)
    assert labels.dtype == np.bool_
    assert labels.mean() == pytest.approx(1 / (1 + math.exp(-2)), abs=0.01)
    again = reviews.noisy_preferences(np.random.default_rng(0), a, b, 0.5)
    np.testing.assert_array_equal(labels, again)
    sharp = reviews.noisy_preferences(np.random.default_rng(0), b, a, 1e-4)
    assert not sharp.any()
