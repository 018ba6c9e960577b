"""The classes of ``symbols``: pictographs of DejaVu Sans (U+2600-27BF) with plain English names, grouped in topics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Symbol:
    """One class: its name, the code point that is drawn, its topic."""

    name: str
    codepoint: int
    topic: str


# name -> code point, by topic. Glyphs that differ only in orientation, weight or fill are left out.
_TOPICS: dict[str, dict[str, int]] = {
    "weather": {
        "sun": 0x2600,
        "cloud": 0x2601,
        "umbrella": 0x2602,
        "snowman": 0x2603,
        "comet": 0x2604,
        "lightning": 0x26A1,
        "snowflake": 0x2744,
        "moon": 0x263D,
        "rain": 0x2614,
        "hot spring": 0x2668,
    },
    "games": {
        "chess king": 0x265A,
        "chess queen": 0x265B,
        "chess rook": 0x265C,
        "chess bishop": 0x265D,
        "chess knight": 0x265E,
        "chess pawn": 0x265F,
        "spade": 0x2660,
        "heart": 0x2665,
        "diamond": 0x2666,
        "club": 0x2663,
        "die": 0x2684,
        "draughts piece": 0x26C3,
    },
    "tools": {
        "scissors": 0x2702,
        "hammer": 0x2692,
        "anchor": 0x2693,
        "gear": 0x2699,
        "swords": 0x2694,
        "scales": 0x2696,
        "burner": 0x2697,
        "key": 0x26B7,
        "ship wheel": 0x2638,
        "sickle": 0x262D,
    },
    "faces": {
        "smiling face": 0x263A,
        "frowning face": 0x2639,
        "pointing finger": 0x261B,
        "victory hand": 0x270C,
        "writing hand": 0x270D,
        "skull": 0x2620,
    },
    "signs": {
        "warning sign": 0x26A0,
        "radioactive sign": 0x2622,
        "biohazard": 0x2623,
        "recycling": 0x267B,
        "wheelchair": 0x267F,
        "peace sign": 0x262E,
        "yin yang": 0x262F,
        "check mark": 0x2714,
        "cross mark": 0x2718,
        "plus sign": 0x271A,
        "exclamation mark": 0x2762,
        "arrow": 0x27A1,
        "infinity": 0x267E,
    },
    "office": {
        "telephone": 0x260E,
        "envelope": 0x2709,
        "airplane": 0x2708,
        "pencil": 0x270F,
        "fountain pen": 0x2712,
        "coffee cup": 0x2615,
        "ballot box": 0x2612,
        "paragraph mark": 0x2761,
        "quotation mark": 0x275E,
        "flag": 0x2691,
        "tape drive": 0x2707,
    },
    "music": {
        "musical note": 0x266A,
        "beamed notes": 0x266B,
        "flat note": 0x266D,
        "sharp note": 0x266F,
    },
    "planets": {
        "mercury": 0x263F,
        "venus": 0x2640,
        "mars": 0x2642,
        "jupiter": 0x2643,
        "saturn": 0x2644,
        "uranus": 0x2645,
        "neptune": 0x2646,
        "pluto": 0x2647,
    },
    "zodiac": {
        "ram": 0x2648,
        "bull": 0x2649,
        "twins": 0x264A,
        "crab": 0x264B,
        "lion": 0x264C,
        "scorpion": 0x264F,
        "archer": 0x2650,
        "goat": 0x2651,
        "waves": 0x2652,
        "fish": 0x2653,
    },
    "emblems": {
        "star": 0x2605,
        "star of david": 0x2721,
        "crescent and star": 0x262A,
        "ankh": 0x2625,
        "lily": 0x269C,
        "snake staff": 0x2624,
        "maltese cross": 0x2720,
        "church cross": 0x271D,
        "atom": 0x269B,
        "asterisk": 0x2731,
        "pinwheel": 0x272F,
        "sparkle": 0x2726,
    },
    "nature": {
        "flower": 0x2698,
        "shamrock": 0x2618,
        "blossom": 0x273F,
        "leaf": 0x2766,
        "coffin": 0x26B0,
        "urn": 0x26B1,
    },
}

SYMBOLS: tuple[Symbol, ...] = tuple(Symbol(n, c, t) for t, names in _TOPICS.items() for n, c in names.items())
TOPICS: tuple[str, ...] = tuple(_TOPICS)

# What a topic's captions say after the thing's name: a data set with a template of its own.
TOPIC_TEMPLATES: dict[str, str] = {
    "weather": "a photo of a {}, a kind of weather.",
    "games": "a photo of a {}, a piece of a game.",
    "tools": "a photo of a {}, a tool.",
    "faces": "a photo of a {}, a person.",
    "signs": "a photo of a {}, a public sign.",
    "office": "a photo of a {}, a thing in an office.",
    "music": "a photo of a {}, a sign of music.",
    "planets": "a photo of a {}, a planet.",
    "zodiac": "a photo of a {}, a sign of the zodiac.",
    "emblems": "a photo of a {}, an emblem.",
    "nature": "a photo of a {}, a thing in a garden.",
}
