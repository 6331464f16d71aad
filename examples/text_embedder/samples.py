"""Texts of six subjects, from three words to a paragraph. The subjects go first; each text must land nearest its own.

A text's answer is the subject whose embedding is closest, so the check needs no threshold. Torch is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..sample import Answer, Sample, cycled

TITLE = "MiniLM files texts under the nearest subject"
ASKED, ANSWERED = "text", "nearest subject"

TITLES: Mapping[str, str] = {
    "cooking food in a kitchen": "cooking",
    "space travel and astronomy": "space and astronomy",
    "cats, dogs and other pets": "cats, dogs and pets",
    "football matches and sports": "football and sports",
    "the weather forecast": "the weather",
    "money, banks and the stock market": "money and banks",
}
"""Each subject, as it is embedded, and as it is shown."""

SUBJECTS: Mapping[str, tuple[str, ...]] = {
    "cooking food in a kitchen": (
        "Knead the dough.",
        "Simmer the onions in butter until they are soft and golden.",
        "How long should I roast a chicken, and at what temperature?",
        "A pinch of salt brings out the sweetness of ripe tomatoes.",
        "The soup was too thin, so she let it boil for ten more minutes and stirred in a spoon of flour.",
        "Whisk three eggs with sugar, fold in the melted chocolate, pour the batter into a tin and bake it until a "
        "knife comes out clean.",
        "Which pan is best for frying fish?",
        "My grandmother's recipe for lentil stew calls for cumin, garlic and a whole lemon.",
        "Rinse the rice twice before you steam it.",
        "Fresh basil, pine nuts, olive oil and parmesan make a pesto in five minutes.",
    ),
    "space travel and astronomy": (
        "The rocket lifted off.",
        "Astronauts on the space station see sixteen sunrises a day.",
        "The telescope found water vapour in the atmosphere of a distant planet.",
        "How far away is the nearest galaxy?",
        "After seven months of flight the probe entered its orbit around Mars and sent its first pictures home.",
        "A comet's tail always points away from the Sun.",
        "The spacecraft landed near the south pole of the Moon, where craters that never see sunlight may hold frozen "
        "water.",
        "Saturn's rings are made of countless pieces of ice and rock.",
        "Engineers tested the heat shield for the return through the atmosphere.",
        "Neutron stars spin hundreds of times a second.",
    ),
    "cats, dogs and other pets": (
        "The kitten purred.",
        "Our dog barks whenever the postman comes up the garden path.",
        "How often should I feed a six-month-old puppy?",
        "The cat slept on the warm windowsill all afternoon.",
        "A hamster needs a wheel, fresh hay and a quiet corner.",
        "The vet vaccinated the rabbits and said that the older one should lose a little weight before winter.",
        "She adopted a shy greyhound from the animal shelter.",
        "He taught his parrot to whistle.",
        "Take the dog for a long walk before you leave it alone, and it will sleep until you are back.",
        "Cats groom themselves for several hours a day.",
    ),
    "football matches and sports": (
        "What a goal!",
        "The striker scored twice in the second half.",
        "The referee showed a red card after a late tackle.",
        "Our team lost the final on penalties, although it had led until the last minute of extra time.",
        "Who won the match last night?",
        "The goalkeeper saved a header from close range.",
        "She trains every morning before the championship.",
        "Thousands of fans sang in the stadium long after the final whistle.",
        "The coach changed his line-up at half-time and put a third defender on the pitch.",
        "The league table is led by the club that was promoted only last season.",
    ),
    "the weather forecast": (
        "It will rain tomorrow.",
        "A thunderstorm is coming in from the west this evening.",
        "Expect frost overnight and fog in the valleys.",
        "Will it be sunny at the weekend?",
        "Temperatures climb to thirty degrees on Friday before a cold front brings showers and strong winds.",
        "Snow is falling above a thousand metres.",
        "The hurricane lost strength when it reached the coast, but heavy rainfall is still likely inland.",
        "A mild and cloudy day with a light breeze.",
        "The drought may end next week, when a low-pressure area at last brings rain to the whole region.",
        "Take an umbrella, there is drizzle on the way.",
    ),
    "money, banks and the stock market": (
        "Shares fell sharply.",
        "The central bank raised its interest rate by a quarter of a point.",
        "How do I open a savings account?",
        "Investors sold bonds after the inflation figures came out.",
        "The company's profit doubled, yet its stock dropped because analysts had hoped for even more.",
        "She pays back her mortgage in monthly instalments over twenty years.",
        "The euro gained two per cent against the dollar.",
        "Diversify your portfolio, keep the fees low and do not sell in a panic when the market goes down.",
        "The lender refused the loan because the credit score was too low.",
        "Dividends are taxed in the year in which they are paid.",
    ),
}


def samples(count: int | None = None) -> list[Sample]:
    """Return `count` texts, the six subjects first; by default every text once."""
    every = [_sample(subject, subject, original=True) for subject in SUBJECTS]
    columns = zip(*SUBJECTS.values(), strict=True)
    every += [_sample(text, subject) for row in columns for subject, text in zip(SUBJECTS, row, strict=True)]
    return cycled(every, len(every) if count is None else count)


def reader() -> Callable[[Sample, Mapping[str, Any]], Answer]:
    """Return what reads the answer from a result's outputs; it remembers the subjects that it has seen."""
    subjects: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}

    def read(sample: Sample, outputs: Mapping[str, Any]) -> Answer:
        embedding = np.asarray(outputs["embedding"], np.float32).reshape(-1)
        if sample.original:
            subjects[TITLES[sample.name]] = embedding
        nearest = max(subjects, key=lambda subject: float(subjects[subject] @ embedding))
        return Answer(nearest, float(subjects[nearest] @ embedding))

    return read


def _sample(text: str, subject: str, original: bool = False) -> Sample:
    title = TITLES[subject]
    return Sample(text, f"about {title}", {"text": [text.encode()]}, (title,), original)
