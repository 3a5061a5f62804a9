"""The texts that the gate's profiles are made of. A changed text is another baseline."""

from typing import Literal

# The published bar: these five, eight greedy steps each.
M8 = (
    "The capital of France is",
    "2 plus 2 equals",
    "The opposite of hot is",
    "Once upon a time there was a",
    "The chemical symbol for gold is",
)

# Held out: no recipe is tuned on them.
STRICT = (
    "Water freezes at a temperature of",
    "The longest river of South America is called",
    "The planet with the most visible rings is",
    "Q: How many legs does a spider have?\nA:",
    "17 + 26 = 43\n38 + 45 = 83\n52 + 19 =",
    "A baker makes 12 loaves an hour. After 5 hours she has made",
    "1, 1, 2, 3, 5, 8, 13,",
    'def is_even(number):\n    """Return True when the number can be divided by two."""\n    return',
    "SELECT name, price FROM products WHERE price >",
    '{"city": "Oslo", "country": "Norway", "population":',
    "Things to pack for a week at the sea:\n1. Sunscreen\n2. Towels\n3.",
    "Days of the week: Monday, Tuesday,",
    '"Did you remember the keys?" asked Maria.\n"Of course," said Tom. "They are',
    "Customer: My parcel has not arrived yet.\nAgent: I am sorry to hear that. Could you please",
    "Die Hauptstadt von Deutschland ist",
    "Le petit déjeuner est prêt : il y a du pain, du beurre et",
    "En el jardín de mi abuela crecen muchas flores, sobre todo",
    "Dear Ms. Okafor,\n\nThank you for your letter of 3 March. We would like to",
    "Wait... what?! No -- that can't be",
    "The old lighthouse keeper climbed the stairs every evening, because",
)

# User messages for the model's chat template.
CHAT = (
    "Name three animals that can fly.",
    "Explain in one sentence why the sky looks blue.",
)

TEXTS: dict[Literal["m8", "strict"], tuple[str, ...]] = {"m8": M8, "strict": STRICT}
CHAT_TEXTS = CHAT

# For the sequence that fills the context. A prime number of sentences, so that every stride visits all of them.
SENTENCES = (
    "The ferry leaves the harbour at twenty past six, whatever the weather.",
    "Nobody had wound the clock in the hall since the spring.",
    "She wrote the number 4,817 on the back of the ticket and put it away.",
    "Most of the orchard was planted in 1932 by a man who disliked apples.",
    "In the second drawer lay a compass, two candles and a map of the coast.",
    "Rain makes the slate roofs shine like the backs of fish.",
    "The teacher asked why the shadow of the pole was shorter at noon.",
    "A good knife is worth more than three bad ones.",
    "On Thursdays the market sells cheese, honey and second-hand books.",
    "He counted the steps again: ninety-one, exactly as his father had said.",
    "Copper turns green in the air, but the colour takes years to come.",
    "The letter began without a greeting and ended without a name.",
    "Every winter the lake freezes from the north shore first.",
    "They measured the bridge twice, because the first result was too good.",
    "My grandmother kept bees and spoke to them every morning.",
    "The train was late by 37 minutes; no one seemed surprised.",
    "To make the dough, mix flour, water and salt, and then wait.",
    "Somewhere below the kitchen window a dog was barking at the wind.",
    "The library closes at five, except in August.",
    "It takes eight minutes for the light of the sun to arrive here.",
    "The captain trusted his barometer more than the newspaper.",
    "Three of the five witnesses remembered a blue car.",
    "When the power failed, the whole street went out to look at the stars.",
    "The recipe says one lemon, but two are better.",
    "An empty bottle had stood on the wall for so long that moss grew around it.",
    "The shortest way to the village leads through the cemetery.",
    "You cannot tell from the outside whether a chestnut is sweet.",
    "The violin had been repaired so often that little of the old wood was left.",
    "At low tide you can walk to the island in half an hour.",
    "His answer was polite, precise and of no use at all.",
    "Every map of the valley shows a road that was never built.",
)


def long_text(characters: int) -> str:
    """At least `characters` of text: all sentences in order, then again and again with a growing stride.

    So no stretch repeats the one before it, and the model cannot just copy.
    """
    parts: list[str] = []
    length = turn = 0
    while length < characters:
        stride = turn % (len(SENTENCES) - 1) + 1
        for i in range(len(SENTENCES)):
            parts.append(SENTENCES[i * stride % len(SENTENCES)])
            length += len(parts[-1]) + 1
        turn += 1
    return " ".join(parts)
