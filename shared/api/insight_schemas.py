"""Insights into learned prompts, in JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class TensorDrift(BaseModel):
    """How far a tensor is from its start: L2, and that over the start's own norm (null where that is 0).

    ``step`` is the same from the state that is listed before; null where that has no such tensor.
    """

    distance: float
    relative: float | None
    step: float | None = None
    relative_step: float | None = None


class DriftPoint(BaseModel):
    """The learned tensors after a round against those of round 0."""

    round: int
    tensors: dict[str, TensorDrift]


class Similarity(BaseModel):
    """Cosines between what the clients of a phase changed; null beside a client that changed nothing."""

    phase: str
    clients: list[str]
    omitted: int = Field(description="further clients of the phase, in order of name, that are not shown")
    cosines: list[list[float | None]]


class NearestWord(BaseModel):
    """A word, and the Euclidean distance of its embedding."""

    word: str
    distance: float


class ContextWords(BaseModel):
    """The nearest words of each vector of one context, nearest first."""

    label: str
    vectors: list[list[NearestWord]]


class WordsView(BaseModel):
    """Contexts in words. ``spacing``: the median distance of a word to its nearest other one, for comparison."""

    spacing: float | None
    contexts: list[ContextWords]


class PlanePoint(BaseModel):
    """A client's vector in the plane."""

    client: str
    x: float
    y: float


class PlaneView(BaseModel):
    """Clients' vectors on their first two principal components; ``explained`` are those' shares of the variance."""

    of: Literal["contexts", "descriptors"] = Field(description="generated for each client, or kept of it")
    explained: list[float]
    points: list[PlanePoint]


class Missing(BaseModel):
    """What cannot be shown, and why."""

    what: Literal["drift", "similarity", "words"]
    why: str


class InsightsView(BaseModel):
    """What the tensors of a federation tell about its prompts after a round."""

    round: int
    state_hash: str
    drift: list[DriftPoint]
    similarity: list[Similarity] = Field(description="of the round's phases")
    words: WordsView | None
    plane: PlaneView | None = Field(description="of pFedPG's descriptors, or the contexts that FedTPG generates")
    missing: list[Missing]


class LexiconView(BaseModel):
    """What of the backbone's constants the coordinator has been given, and for which class names it wants features."""

    words: int | None = Field(description="how many; null: no lexicon has been supplied")
    class_names: list[str] = Field(description="those that clients tell apart")
    featureless: int = Field(description="how many of them have no text feature here")
