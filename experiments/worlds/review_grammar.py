"""The words and the probabilistic grammar of `reviews.py`."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

Words = tuple[str, ...]
Options = list[tuple[float, Words]]  # (weight, expansion of the symbol)
Grammar = dict[str, Options]  # symbols are upper case, words are lower case
# Opinion words by grade: how favourable they are.
ADJECTIVES = {
    2: "amazing brilliant excellent fantastic outstanding perfect superb wonderful",
    1: "decent elegant fine good handy impressive nice pleasant practical solid sturdy",
    -1: "annoying awkward clumsy dull flimsy inferior mediocre poor shabby ugly weak",
    -2: "abysmal appalling atrocious awful dreadful horrible terrible worthless",
}
ADVERBS = {
    2: "beautifully brilliantly flawlessly perfectly superbly",
    1: "nicely properly reliably smoothly well",
    -1: "badly clumsily poorly sluggishly unreliably",
    -2: "abysmally appallingly dreadfully horribly terribly",
}
VERBS = {2: "adore love", 1: "enjoy like", -1: "dislike regret", -2: "hate loathe"}
VERBS_OF_ONE = {
    grade: " ".join(f"{verb}s" for verb in verbs.split())
    for grade, verbs in VERBS.items()
}
GRADES: dict[str, int] = {
    word: grade
    for lexicon in (ADJECTIVES, ADVERBS, VERBS, VERBS_OF_ONE)
    for grade, words in lexicon.items()
    for word in words.split()
}
NOUNS = (
    "kettle pan blender toaster mug pot phone laptop camera tablet printer radio "
    "jacket shirt coat sweater glove cap chair table sofa desk stool lamp "
    "bike tent kayak sled scooter helmet guitar piano violin drum flute banjo"
)
PART = "lid|handle|frame|case|finish|design|sound|strap"
PARTS = "buttons|corners|joints|seams|colours|parts"
LOOKS = "blue|red|green|black|white|small|large|old"
ORIGINS = (
    "on sale|for work|from abroad|from my aunt|from our neighbour|for the office"
    "|for the rainy season|from a new catalogue|for my daughter in june"
)
ONE_PERSON = "my aunt|my boss|my daughter|my brother|our neighbour"
PEOPLE = "i|we|my kids|my parents|our guests"
TIMES = "last week|last month|in march|in june|on monday|on friday|this summer|today"
DEGREES = "very|really|rather|simply"
REVIEWS: Options = [
    (weight, tuple(pattern.split()))
    for weight, pattern in (
        (2, "SIMPLE"),
        (4, "FACT SIMPLE"),
        (4, "SIMPLE SIMPLE"),
        (4, "COMPOUND"),
        (3, "FACT COMPOUND"),
        (3, "SIMPLE COMPOUND"),
        (2, "COMPOUND SIMPLE"),
        (2, "SIMPLE SIMPLE SIMPLE"),
        (1, "COMPOUND COMPOUND"),
        (1, "SIMPLE SIMPLE SIMPLE SIMPLE"),
    )
]


class Product(NamedTuple):
    """The product of a prompt; its responses agree with it in number."""

    noun: str
    plural: bool


PRODUCTS = tuple(
    Product(f"{noun}s" if plural else noun, plural)
    for noun in NOUNS.split()
    for plural in (False, True)
)


def _even(phrases: str) -> Options:
    return [(1.0, tuple(phrase.split())) for phrase in phrases.split("|")]


def _opinions(lexicon: dict[int, str], sign: int) -> Options:
    """Words of one sign; a strong word is half as likely as a mild one."""
    return [
        (1 / abs(grade), (word,))
        for grade, words in lexicon.items()
        if grade * sign > 0
        for word in words.split()
    ]


@functools.cache
def grammar_of(plural: bool) -> Grammar:
    """The grammar of responses to prompts about a singular or a plural product."""
    it, them, are, work = (
        ("they", "them", "are", "work") if plural else ("it", "it", "is", "works")
    )
    grammar: Grammar = {
        "REVIEW": REVIEWS,
        "SIMPLE": _even("OPINION ."),
        "COMPOUND": _even("OPINION and OPINION .|OPINION but OPINION ."),
        "OPINION": _even("GOOD|BAD"),
        "FACT": _even(f"ANYONE DID {them} TIME ."),
        "ANYONE": _even(f"{ONE_PERSON}|{PEOPLE}"),
        "ONE-PERSON": _even(ONE_PERSON),
        "PEOPLE": _even(PEOPLE),
        "DID": _even("bought|ordered|unpacked|borrowed|tried"),
        "TIME": _even(TIMES),
        "PART": _even(PART),
        "PARTS": _even(PARTS),
        "DEGREE": [(6, ()), *_even(DEGREES)],
        "GIFT": _even("gift|choice|purchase"),
        "GIFTS": _even("gifts|choices|purchases"),
    }
    for name, sign in (("GOOD", 1), ("BAD", -1)):
        adjectives = _opinions(ADJECTIVES, sign)
        grammar |= {
            name: [
                (3, (it, are, "DEGREE", f"{name}-ADJECTIVE")),
                (1, ("the", "PART", "is", "DEGREE", f"{name}-ADJECTIVE")),
                (1, ("the", "PARTS", "are", "DEGREE", f"{name}-ADJECTIVE")),
                (2, (it, are, f"{name}-GIFT")),
                (2, (it, work, "DEGREE", f"{name}-ADVERB")),
                (1, ("ONE-PERSON", f"{name}-VERB-OF-ONE", them)),
                (2, ("PEOPLE", f"{name}-VERB", them)),
            ],
            f"{name}-ADJECTIVE": adjectives,
            f"{name}-GIFT": [
                (weight, (word, "GIFTS"))
                if plural
                else (weight, ("an" if word[0] in "aeiou" else "a", word, "GIFT"))
                for weight, (word,) in adjectives
            ],
            f"{name}-ADVERB": _opinions(ADVERBS, sign),
            f"{name}-VERB": _opinions(VERBS, sign),
            f"{name}-VERB-OF-ONE": _opinions(VERBS_OF_ONE, sign),
        }
    return grammar


def open_options(options: Options, words: Iterable[str]) -> Options:
    """Returns the options that repeat no opinion word of `words`, as probabilities."""
    taken = GRADES.keys() & words
    left = [(w, expansion) for w, expansion in options if taken.isdisjoint(expansion)]
    total = sum(weight for weight, _ in left)
    return [(weight / total, expansion) for weight, expansion in left]
