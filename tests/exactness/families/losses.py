"""All losses of Keras, their reductions with weights and masks, and losses that users write."""

from __future__ import annotations

from exactness.case import EVEN, UNEVEN, Case

TAGS = ("Embedding(10, 4)", "Dense(3)")
MASKED = ("Embedding(10, 4, mask_zero=True)", "Dense(3)")
REDUCTIONS = ("sum", "mean_with_sample_weight", None)


def _loss(name: str, **kwargs: object) -> Case:
    return Case("losses", name, loss=name, **{"metrics": ""} | kwargs)  # type: ignore[arg-type]


def _flags(name: str) -> Case:
    return _loss(name, layers=("Dense(4, 'tanh')", "Dense(1, 'sigmoid')"), y="flags")


def _classes(name: str, y: str = "one-hot") -> Case:
    return _loss(name, layers=("Dense(4, 'tanh')", "Dense(3, 'softmax')"), y=y)


def _masks(name: str, rate: str = "0.1") -> Case:
    return _loss(
        name, layers=("Conv2D(1, 3, padding='same', activation='sigmoid')",), x="images", y="masks"
    )


KERAS = (
    _loss("MeanSquaredError()"),
    _loss("MeanAbsoluteError()"),
    _loss("MeanAbsolutePercentageError()", y="positive numbers", optimizer="SGD(1e-4)"),
    _loss("MeanSquaredLogarithmicError()", y="positive numbers"),
    _loss("Huber(delta=0.5)"),
    _loss("LogCosh()"),
    _loss("CosineSimilarity()"),
    _loss("Poisson()", layers=("Dense(4, 'tanh')", "Dense(2, 'softplus')"), y="positive numbers"),
    _loss("Hinge()", layers=("Dense(4, 'tanh')", "Dense(1)"), y="signs"),
    _loss("SquaredHinge()", layers=("Dense(4, 'tanh')", "Dense(1)"), y="signs"),
    _flags("BinaryCrossentropy(label_smoothing=0.1)"),
    _flags("BinaryFocalCrossentropy(apply_class_balancing=True)"),
    _classes("CategoricalCrossentropy(label_smoothing=0.1)"),
    _classes("CategoricalFocalCrossentropy()"),
    _classes("CategoricalGeneralizedCrossEntropy()", "classes"),
    _classes("CategoricalHinge()"),
    _classes("KLDivergence()", "probabilities"),
    _classes("SparseCategoricalCrossentropy()", "classes"),
    _classes("SparseCategoricalCrossentropy(ignore_class=-1)", "some ignored"),
    _loss("CTC()", layers=("Dense(4)",), x="signals", y="labels", optimizer="SGD(0.01)"),
    _masks("Dice(axis=(1, 2, 3))"),
    _masks("Dice()"),
    _masks("Tversky(axis=(1, 2, 3))"),
    _masks("Tversky()"),
    _loss("Circle(gamma=8.0)", layers=("Dense(4, 'tanh')", "UnitNormalization()"), y="classes"),
)


def _reductions(y: str, layers: tuple[str, ...], loss: str, weights: str, rate: str) -> list[Case]:
    return [
        Case(
            "losses: reductions",
            f"{loss}, reduction={reduction!r}, weights {weights or 'none'}"
            + (", masked" if layers is MASKED else ""),
            layers,
            x="padded words" if layers is MASKED else "words" if layers is TAGS else "vectors",
            y=y,
            weights=weights,
            loss=f"{loss}(reduction={reduction!r}{', from_logits=True' if 'Cross' in loss else ''})",
            optimizer=f"SGD({rate})",
            metrics="",
            compiled={"weighted_metrics": "[]"},
        )
        for reduction in ("sum_over_batch_size", *REDUCTIONS)
    ]


DENSE = ("Dense(4, 'tanh')", "Dense(2)")
REDUCED = (
    *_reductions("numbers", DENSE, "MeanSquaredError", "", "0.02"),
    *_reductions("numbers", DENSE, "Huber", "of examples", "0.02"),
    *_reductions("numbers", DENSE, "MeanSquaredError", "zero for half of a batch", "0.02"),
    *_reductions("tags", TAGS, "SparseCategoricalCrossentropy", "of words", "0.02"),
    *_reductions("tags", MASKED, "SparseCategoricalCrossentropy", "", "0.02"),
    *_reductions("tags", MASKED, "SparseCategoricalCrossentropy", "of words", "0.02"),
)


def _weighted(weights: str, **kwargs: object) -> Case:
    reduction = kwargs.pop("reduction", "sum_over_batch_size")
    return Case(
        "losses: sample weights",
        f"{weights}, reduction={reduction!r}" + "".join(f", {v}" for v in kwargs.values()),
        weights=weights,
        loss=f"MeanSquaredError(reduction={reduction!r})",
        compiled={"weighted_metrics": "['mae']"},
        answers=True,
        **kwargs,  # type: ignore[arg-type]
    )


WEIGHTED = (
    _weighted("zero for a batch"),
    _weighted("zero for a batch", reduction="mean_with_sample_weight"),
    _weighted("zero for the last batch"),
    _weighted("zero for the last batch", reduction="mean_with_sample_weight"),
    _weighted("negative"),
    _weighted("of examples", examples=UNEVEN, reduction="mean_with_sample_weight"),
    Case(
        "losses: sample weights",
        "class_weight",
        ("Dense(4, 'tanh')", "Dense(3, 'softmax')"),
        y="classes",
        loss="'sparse_categorical_crossentropy'",
        metrics="['accuracy']",
        fit={"class_weight": "{0: 0.5, 2: 3.0}"},
    ),
    Case(
        "losses: sample weights",
        "class_weight, one-hot labels",
        ("Dense(4, 'tanh')", "Dense(3, 'softmax')"),
        y="one-hot",
        loss="'categorical_crossentropy'",
        metrics="['accuracy']",
        fit={"class_weight": "{0: 0.5, 1: 2.0, 2: 3.0}"},
    ),
)


def _outputs(name: str, **kwargs: object) -> Case:
    layers = ("Dense(4, 'tanh')", "Heads()")
    # Keras weighs the loss of each output by the batch's size only where it knows the size.
    compiled = {"run_eagerly": "True"} | kwargs.pop("compiled", {})  # type: ignore[operator]
    return Case(
        "losses: several outputs",
        name,
        layers,
        y="two outputs",
        metrics="",
        compiled=compiled,
        **kwargs,
    )  # type: ignore[arg-type]


OUTPUTS = (
    _outputs("one loss for all", loss="'mse'"),
    _outputs("one Loss object for two outputs", loss="(lambda l: {'one': l, 'other': l})(Huber())"),
    _outputs(
        "loss_weights",
        loss="{'one': 'mse', 'other': Huber(reduction='sum')}",
        compiled={"loss_weights": "{'one': 0.3, 'other': 0.1}"},
    ),
    _outputs("a loss for one output alone", loss="{'one': 'mse', 'other': None}"),
    _outputs(
        "sample weights of each output",
        loss="{'one': 'mse', 'other': MeanSquaredError(reduction='mean_with_sample_weight')}",
        weights="of outputs",
        compiled={"weighted_metrics": "[]"},
    ),
    _outputs("reduction=None", loss="MeanSquaredError(reduction=None)", optimizer="SGD(0.01)"),
)


def _own(name: str, loss: str, **kwargs: object) -> Case:
    return Case(
        "losses of your own",
        name,
        **{"loss": loss, "metrics": "", "optimizer": "SGD(0.02)"} | kwargs,  # type: ignore[arg-type]
    )


OWN = (
    _own("a value for each example", "Each()"),
    _own("a value for each example, in a function", "each"),
    _own("a value for each example, reduction='sum'", "Each(reduction='sum')"),
    _own("the mean over the batch", "Mean()"),
    _own("the mean over the batch, in a function", "mean"),
    _own("the mean over the batch, sample weights", "mean", weights="of examples"),
    _own("the mean over the batch, reduction='sum'", "Mean(reduction='sum')"),
    _own("the sum over the batch", "Sum()"),
    _own("the sum over the batch, in a function", "total"),
    _own("the sum over the batch, reduction='sum'", "Sum(reduction='sum')"),
    _own("the root of the mean", "root"),
    _own("the root of the mean, full batches", "root", examples=EVEN),
    _own("a mean over what is no padding", "masked", layers=TAGS, x="words", y="tags"),
    _own("contrastive (CLIP, InfoNCE)", "Contrastive()"),
    _own("contrastive, one example for each of three workers", "Contrastive()", batch=3),
    _own("contrastive, mixed_float16", "Contrastive()", policy="mixed_float16",
         layers=("Dense(4, 'tanh')", "Dense(2, dtype='float32')")),
    _own("contrastive, in Loss.__call__", "Whole()"),
    _own("batch-hard triplets", "triplet", y="classes"),
    _own("the variance of the batch", "variance"),
    _own("add_loss of a mean", "'mse'", layers=("Dense(4, 'tanh')", "Penalty('mean')", "Dense(2)")),
    _own("add_loss of a sum", "'mse'", layers=("Dense(4, 'tanh')", "Penalty('sum')", "Dense(2)")),
    _own("add_loss of a vector", "'mse'", layers=("Dense(4, 'tanh')", "Penalty('vector')", "Dense(2)")),
    _own("add_loss of a mean and reduction='sum'", "MeanSquaredError(reduction='sum')",
         layers=("Dense(4, 'tanh')", "Penalty('mean')", "Dense(2)")),
    _own("add_loss alone", "", layers=("Endpoint()", "Dense(3)", "Penalty('mean')"), x="two inputs", y=""),
    _own("kernel regularizer", "'mse'",
         layers=("Dense(4, 'tanh', kernel_regularizer=regularizers.L2(0.1))", "Dense(2)")),
    _own("kernel regularizer and reduction='sum'", "MeanSquaredError(reduction='sum')",
         layers=("Dense(4, 'tanh', kernel_regularizer=regularizers.L2(0.1))", "Dense(2)")),
    _own("orthogonal regularizer", "'mse'",
         layers=("Dense(4, 'tanh', kernel_regularizer=regularizers.OrthogonalRegularizer())", "Dense(2)")),
    _own("activity regularizer", "'mse'",
         layers=("Dense(4, 'tanh', activity_regularizer=regularizers.L2(0.1))", "Dense(2)")),
    _own("activity regularizer and reduction='sum'", "MeanSquaredError(reduction='sum')",
         layers=("Dense(4, 'tanh', activity_regularizer=regularizers.L2(0.1))", "Dense(2)")),
    _own("compute_loss: the mean", "", model="OwnLoss"),
    _own("compute_loss: the sum", "", model="OwnSum"),
    _own("compute_loss: a value for each example", "", model="OwnVector"),
    _own("compute_loss: contrastive", "", model="OwnContrastive"),
)  # fmt: skip

CASES = (*KERAS, *REDUCED, *WEIGHTED, *OUTPUTS, *OWN)
