"""Cases that nobody wrote, for hypothesis: layers, losses, metrics, weights and data in any combination.

What is in it must come out equal, warned or refused on any number of ranks. Adam and its like have a large epsilon:
where a gradient is nothing but rounding (a bias before a normalization), they would otherwise make a step of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exactness.case import Case
from hypothesis import strategies as st

BODIES: Mapping[str, Sequence[str]] = {
    "vectors": ("Dense(3, 'relu')",),
    "signals": (
        "Conv1D(3, 2)", "LSTM(3)", "GRU(2, return_sequences=True)", "Bidirectional(SimpleRNN(2))",
        "Twice(MultiHeadAttention(2, 2))", "GroupNormalization(2)",
    ),
    "images": ("Conv2D(2, 3)", "DepthwiseConv2D(2)", "MaxPooling2D(2)", "SyncBatchNormalization()"),
    "words": ("Embedding(10, 3)",),
    "padded words": ("Embedding(10, 3, mask_zero=True)",),
}  # fmt: skip
BETWEEN = (
    "Dense(4, 'tanh')", "LayerNormalization()", "SyncBatchNormalization()", "SpectralNormalization(Dense(3))",
    "Dropout(0.0)", "Penalty('mean')", "Penalty('sum')", "Counter()", "Counter('float32', True)", "Centering()",
    "Among()", "Dense(3, 'tanh', kernel_regularizer=regularizers.L2(0.1))", "BatchNormalization()",
)  # fmt: skip
OPTIMIZERS = (
    "SGD(0.05)", "SGD(0.05, momentum=0.9)", "Adam(0.01, epsilon=1e-2)", "AdamW(0.01, epsilon=1e-2)",
    "RMSprop(0.01, epsilon=1e-2)", "Adagrad(0.05, epsilon=1e-2)", "SGD(0.05, clipnorm=0.1)",
    "SGD(0.05, global_clipnorm=0.1)", "SGD(0.05, gradient_accumulation_steps=2)",
    "SGD(0.05, use_ema=True, ema_overwrite_frequency=2)", "SGD(schedules.ExponentialDecay(0.05, 2, 0.5))",
)  # fmt: skip
REDUCTIONS = ("'sum_over_batch_size'", "'sum'", "'mean_with_sample_weight'", "None")
WEIGHTS = (
    "", "of examples", "zero for half of a batch", "zero for a batch", "zero for the last batch",
)  # fmt: skip
SOURCES = ("arrays", "Dataset", "PyDataset")
"""Not those of unknown length: Keras makes one step too many in each epoch, which accumulation counts."""


@dataclass(frozen=True)
class Task:
    """What fits together behind a model's body."""

    y: str
    end: str
    losses: Sequence[str]
    metrics: Sequence[str]


TASKS = (
    Task(
        "numbers",
        "Dense(2)",
        ("MeanSquaredError({})", "Huber(delta=0.5, {})", "Each({})", "Mean({})"),
        (
            "'mae'",
            "RootMeanSquaredError()",
            "R2Score()",
            "each_error",
            "rmse",
            "Worst()",
            "Several()",
        ),
    ),
    Task(
        "flags",
        "Dense(1, 'sigmoid')",
        ("BinaryCrossentropy({})", "BinaryFocalCrossentropy({})"),
        ("'accuracy'", "AUC()", "Precision()", "Recall()", "dice", "F1Score(threshold=0.5)"),
    ),
    Task(
        "classes",
        "Dense(3, 'softmax')",
        (
            "SparseCategoricalCrossentropy({})",
            "SparseCategoricalCrossentropy(ignore_class=0, {})",
        ),
        ("'accuracy'", "SparseTopKCategoricalAccuracy(2)", "MeanIoU(3, sparse_y_pred=False)"),
    ),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a case that plain Keras trains."""
    x = draw(st.sampled_from(sorted(BODIES)))
    task = draw(st.sampled_from(TASKS))
    body = draw(st.sampled_from(BODIES[x]))
    between = draw(st.lists(st.sampled_from(BETWEEN), max_size=2, unique=True))
    loss = draw(st.sampled_from(task.losses))
    chosen = draw(st.lists(st.sampled_from(task.metrics), max_size=2, unique=True))
    metrics = f"[{', '.join(chosen)}]"
    model = draw(st.sampled_from(("functional", "functional", "Guide")))
    # The guide's step knows of no weights.
    weights = "" if model == "Guide" else draw(st.sampled_from(WEIGHTS))
    return Case(
        "any",
        "case",
        (body, "Flatten()", *between, task.end),
        model,
        x=x,
        y=task.y,
        weights=weights,
        source=draw(st.sampled_from(SOURCES)),
        examples=draw(st.integers(9, 31)),
        loss=loss.format(f"reduction={draw(st.sampled_from(REDUCTIONS))}"),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        metrics=metrics,
        compiled={
            "steps_per_execution": str(draw(st.integers(1, 3))),
            "weighted_metrics": metrics.replace("dice", "").replace("[, ", "[")
            if weights
            else "[]",
        },
        fit={"validation_data": "True"} if draw(st.booleans()) else {},
    )
