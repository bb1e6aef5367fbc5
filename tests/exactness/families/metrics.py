"""All metrics of Keras, with weights and masks, and metrics that users write."""

from __future__ import annotations

from collections.abc import Sequence

from exactness.case import Case

FLAGS = ("Dense(4, 'tanh')", "Dense(1, 'sigmoid')")
SOFTMAX = ("Dense(4, 'tanh')", "Dense(3, 'softmax')")
TAGS = ("Embedding(10, 4, mask_zero=True)", "Dense(3, 'softmax')")


def _metrics(names: Sequence[str], y: str, layers: tuple[str, ...], loss: str) -> list[Case]:
    return [
        Case(
            "metrics",
            name,
            layers,
            y=y,
            weights="of examples",
            loss=loss,
            metrics=f"[{name}]",
            compiled={"weighted_metrics": f"[{name}]"},
        )
        for name in names
    ]


NUMBERS = (
    "MeanAbsoluteError()", "MeanSquaredError()", "RootMeanSquaredError()", "LogCoshError()", "CosineSimilarity()",
    "MeanAbsolutePercentageError()", "MeanSquaredLogarithmicError()", "R2Score(class_aggregation=None)",
    "PearsonCorrelation()", "ConcordanceCorrelation()", "Poisson()", "Accuracy()",
    "MeanMetricWrapper(each_error, name='wrapped')",
)  # fmt: skip
OF_FLAGS = (
    "AUC()", "AUC(curve='PR', num_thresholds=20)", "BinaryAccuracy()", "BinaryCrossentropy()",
    "BinaryIoU(target_class_ids=[0, 1])", "Precision()", "Recall(thresholds=[0.3, 0.6])", "TruePositives()",
    "TrueNegatives()", "FalsePositives()", "FalseNegatives()", "PrecisionAtRecall(0.5)", "RecallAtPrecision(0.5)",
    "SensitivityAtSpecificity(0.5)", "SpecificityAtSensitivity(0.5)", "Hinge()", "SquaredHinge()",
)  # fmt: skip
OF_CLASSES = (
    "SparseCategoricalAccuracy()", "SparseCategoricalCrossentropy()", "SparseTopKCategoricalAccuracy(2)",
    "MeanIoU(3, sparse_y_pred=False)", "IoU(3, [0, 2], sparse_y_pred=False)",
)  # fmt: skip
OF_ONE_HOT = (
    "CategoricalAccuracy()", "CategoricalCrossentropy()", "CategoricalHinge()", "KLDivergence()",
    "TopKCategoricalAccuracy(2)", "F1Score(average=None)", "F1Score(average='macro')",
    "FBetaScore(average='weighted', beta=2.0)", "OneHotIoU(3, [0, 1])", "OneHotMeanIoU(3)", "AUC(multi_label=True)",
)  # fmt: skip
KERAS = (
    *_metrics(NUMBERS, "positive numbers", ("Dense(4, 'tanh')", "Dense(2, 'softplus')"), "'mse'"),
    *_metrics(OF_FLAGS, "flags", FLAGS, "'binary_crossentropy'"),
    *_metrics(OF_CLASSES, "classes", SOFTMAX, "'sparse_categorical_crossentropy'"),
    *_metrics(OF_ONE_HOT, "one-hot", SOFTMAX, "'categorical_crossentropy'"),
)

MASKED = tuple(
    Case(
        "metrics: masks and outputs",
        name,
        **{  # type: ignore[arg-type]
            "layers": TAGS,
            "x": "padded words",
            "y": "tags",
            "loss": "'sparse_categorical_crossentropy'",
        }
        | kwargs,
    )
    for name, kwargs in {
        "'accuracy' under a mask": {"metrics": "['accuracy']"},
        "weighted 'accuracy' under a mask": {
            "metrics": "",
            "compiled": {"weighted_metrics": "['accuracy']"},
            "weights": "of words",
        },
        "MeanIoU of masks": {
            "layers": ("Conv2D(1, 3, padding='same', activation='sigmoid')",),
            "x": "images",
            "y": "masks",
            "loss": "'binary_crossentropy'",
            "metrics": "[BinaryIoU(), Precision()]",
        },
        "of each output": {
            "layers": ("Dense(4, 'tanh')", "Heads()"),
            "x": "vectors",
            "y": "two outputs",
            "loss": "'mse'",
            "compiled": {"run_eagerly": "True"},
            "metrics": "{'one': ['mae', 'cosine_similarity'], 'other': [RootMeanSquaredError()]}",
            "answers": True,
        },
    }.items()
)


def _own(name: str, metric: str, **kwargs: object) -> Case:
    return Case(
        "metrics of your own",
        name,
        metrics=f"[{metric}]",
        **{"answers": True} | kwargs,  # type: ignore[arg-type]
    )


OWN = (
    _own("a value for each example", "each_error"),
    _own("a value for each example, weighted", "each_error", weights="of examples",
         compiled={"weighted_metrics": "[each_error]"}),
    _own("the mean over the batch", "mean_error"),
    _own("the sum over the batch", "summed_error"),
    _own("the largest of the batch", "largest_error"),
    _own("the root of the mean", "rmse"),
    _own("a ratio of sums (Dice)", "dice", layers=FLAGS, y="flags", loss="'binary_crossentropy'"),
    _own("a mean over what is no padding", "masked_accuracy", layers=("Embedding(10, 4)", "Dense(3, 'softmax')"),
         x="words", y="tags", loss="'sparse_categorical_crossentropy'"),
    _own("largest so far", "Worst()"),
    _own("smallest so far", "Best()"),
    _own("of the last batch", "Last()"),
    _own("sum of all", "Total()"),
    _own("number of batches, a float", "Steps()"),
    _own("number of batches, an integer", "WholeSteps()"),
    _own("number of examples", "Examples()"),
    _own("moving average over batches", "Smooth()"),
    _own("mean of logarithms of batches", "Geometric()"),
    _own("result is a dict", "Several()"),
)  # fmt: skip

CASES = (*KERAS, *MASKED, *OWN)
