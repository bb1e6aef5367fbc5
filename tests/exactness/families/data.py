"""Kinds of data, and batches that do not divide by the number of workers."""

from __future__ import annotations

from exactness.case import EVEN, IDLE, UNEVEN, Case

SOURCES = (
    "arrays", "frames", "Dataset", "Dataset of full batches", "Dataset, shuffled", "Dataset of unknown length",
    "Dataset of batches of other lengths", "generator", "PyDataset",
)  # fmt: skip
ENDS = {
    IDLE: "one example in the last batch",
    UNEVEN: "three in the last batch",
    EVEN: "full batches",
}

CASES = (
    *(
        Case("data", f"{source}, {end}", source=source, examples=examples)
        for source in SOURCES
        for examples, end in ENDS.items()
        if source in ("arrays", "Dataset", "Dataset of unknown length") or examples == IDLE
    ),
    *(
        Case("data", f"{source}, sample weights", source=source, weights="of examples")
        for source in ("frames", "Dataset", "generator", "PyDataset")
    ),
    *(
        Case("data", f"{source}, two inputs", ("Join()", "Dense(3, 'tanh')", "Dense(2)"), x="two inputs", source=source)
        for source in ("arrays", "Dataset", "generator", "PyDataset")
    ),
    Case("data", "arrays, fewer examples than a batch", examples=5),
    Case("data", "arrays, one example", examples=1),
    Case("data", "Dataset, texts",
         ("StringLookup(vocabulary=['red', 'green'])", "Embedding(3, 3)", "Flatten()", "Dense(2)"), x="texts",
         source="Dataset"),
    Case("data", "arrays, words as integers", ("Embedding(10, 3)", "Flatten()", "Dense(2)"), x="words", answers=True),
    Case("data", "arrays, no labels", ("Dense(4, 'tanh')", "Penalty('mean')"), y="", loss="", metrics=""),
    Case("data", "arrays, labels are images",
         ("Conv2D(4, 3, padding='same', activation='relu')", "Conv2D(2, 3, padding='same')"), x="images", y="images",
         answers=True),
)  # fmt: skip
