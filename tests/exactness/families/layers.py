"""Layers of Keras that compute, those that mix the examples of a batch, and layers that users write."""

from __future__ import annotations

from collections.abc import Sequence

from exactness.case import EVEN, UNEVEN, Case

END = ("Flatten()", "Dense(2)")


def _layers(group: str, x: str, texts: Sequence[str], **kwargs: object) -> list[Case]:
    return [Case(group, text, (text, *END), x=x, **kwargs) for text in texts]  # type: ignore[arg-type]


SIGNALS = (
    "Conv1D(3, 2)", "SeparableConv1D(3, 2)", "LSTM(3)", "GRU(3, return_sequences=True)", "SimpleRNN(3)",
    "Bidirectional(LSTM(3))", "RNN(StackedRNNCells([LSTMCell(3), GRUCell(2)]))", "TimeDistributed(Dense(3))",
    "GlobalMaxPooling1D()",
)  # fmt: skip
IMAGES = (
    "Conv2D(3, 3, activation='relu')", "Conv2DTranspose(3, 2)", "DepthwiseConv2D(2)", "MaxPooling2D(2)",
    "GlobalAveragePooling2D()", "UpSampling2D(2)", "Resizing(3, 3)", "Rescaling(0.5)",
)  # fmt: skip
VOLUMES = ("Conv3D(2, 2)",)
VECTORS = (
    "Dense(3, 'relu')", "EinsumDense('ab,bc->ac', output_shape=3, bias_axes='c')", "PReLU()", "LayerNormalization()",
    "RMSNormalization()", "UnitNormalization()", "SpectralNormalization(Dense(3))", "ActivityRegularization(l2=0.1)",
    "Normalization(mean=0.1, variance=2.0)", "Lambda(lambda x: x * x)", "Dense(3, kernel_constraint='unit_norm')",
    "Both(Multiply())", "Both(Dot(axes=1))",
)  # fmt: skip
ATTENTION = (
    "Twice(MultiHeadAttention(2, 2))", "Twice(GroupQueryAttention(2, 2, 1))", "Both(Attention(use_scale=True))",
    "Both(AdditiveAttention())", "GroupNormalization(2)",
)  # fmt: skip
KERAS = (
    *_layers("layers", "vectors", VECTORS),
    *_layers("layers", "signals", SIGNALS),
    *_layers("layers", "signals", ATTENTION),
    # At a rate of 0.1 their many weights swing, and with them the rounding of sums.
    *_layers("layers", "images", IMAGES, optimizer="SGD(0.01)"),
    *_layers("layers", "volumes", VOLUMES, optimizer="SGD(0.01)"),
    *_layers("layers", "films", ("ConvLSTM2D(2, 2)",)),
    *_layers("layers", "words", ("Embedding(10, 3)",)),
)


def _of(name: str, layers: tuple[str, ...], group: str = "layers", **kwargs: object) -> Case:
    return Case(group, name, layers, **kwargs)  # type: ignore[arg-type]


MASKS = (
    _of("LSTM behind a mask", ("Embedding(10, 3, mask_zero=True)", "LSTM(3)", "Dense(2)"), x="padded words"),
    _of("MultiHeadAttention behind a mask",
        ("Embedding(10, 4, mask_zero=True)", "Twice(MultiHeadAttention(2, 2))", "GlobalAveragePooling1D()", "Dense(2)"),
        x="padded words"),
    _of("positions, looked up once for a batch",
        ("Embedding(10, 4)", "Positions()", "GlobalAveragePooling1D()", "Dense(2)"), x="words",
        optimizer="Adam(0.01)"),
    _of("positions, looked up for each example",
        ("Embedding(10, 4)", "Positions(False)", "GlobalAveragePooling1D()", "Dense(2)"), x="words",
        optimizer="Adam(0.01)"),
    _of("the same weights twice in a step", ("Vote()", "Dense(2)")),
)  # fmt: skip

BATCH_WIDE = "layers that look at the batch"
NORMALISING = (
    _of("SyncBatchNormalization()", ("Dense(4)", "SyncBatchNormalization()", "Dense(2)"), BATCH_WIDE, answers=True),
    _of("SyncBatchNormalization(), uneven", ("Dense(4)", "SyncBatchNormalization()", "Dense(2)"), BATCH_WIDE,
        examples=UNEVEN),
    _of("SyncBatchNormalization(), images",
        ("Conv2D(3, 3)", "SyncBatchNormalization()", "Activation('relu')", *END), BATCH_WIDE, x="images"),
    _of("BatchNormalization()", ("Dense(4)", "BatchNormalization()", "Dense(2)"), BATCH_WIDE),
    _of("BatchNormalization(), full batches", ("Dense(4)", "BatchNormalization()", "Dense(2)"), BATCH_WIDE,
        examples=EVEN),
    _of("BatchNormalization(synchronized=True)", ("Dense(4)", "BatchNormalization(synchronized=True)", "Dense(2)"),
        BATCH_WIDE),
    _of("BatchNormalization(trainable=False)", ("Dense(4)", "BatchNormalization(trainable=False)", "Dense(2)"),
        BATCH_WIDE),
    _of("a batch's mean is taken away", ("Dense(4)", "Among()", "Dense(2)"), BATCH_WIDE),
    _of("attention from example to example", ("Dense(4)", "BatchAttention()", "Dense(2)"), BATCH_WIDE),
)  # fmt: skip

RANDOM = (
    *(
        _of(text, ("Dense(4, 'tanh')", text, "Dense(2)"), "random layers")
        for text in (
            "Dropout(0.5)", "Dropout(0.0)", "GaussianNoise(0.2)", "GaussianDropout(0.2)", "AlphaDropout(0.2)",
            "Noise()",
        )
    ),
    _of("LSTM(3, dropout=0.3)", ("LSTM(3, dropout=0.3)", "Dense(2)"), "random layers", x="signals"),
    _of("MultiHeadAttention(dropout=0.3)", ("Twice(MultiHeadAttention(2, 2, dropout=0.3))", *END), "random layers",
        x="signals"),
    _of("SpatialDropout2D(0.5)", ("Conv2D(3, 3)", "SpatialDropout2D(0.5)", *END), "random layers", x="images"),
    _of("RandomFlip()", ("RandomFlip('horizontal')", "Conv2D(3, 3)", *END), "random layers", x="images"),
    _of("RandomRotation(0.2)", ("RandomRotation(0.2)", "Conv2D(3, 3)", *END), "random layers", x="images"),
)  # fmt: skip

STATES = tuple(
    _of(
        name,
        **{
            "layers": ("Dense(4, 'tanh')", text, "Dense(2)"),
            "group": "layers with a state of their own",
        }
        | kwargs,
    )
    for name, text, kwargs in (
        ("counts steps, an integer", "Counter()", {}),
        ("counts steps, a float", "Counter('float32')", {}),
        ("counts examples, an integer", "Counter('int32', True)", {}),
        ("counts examples, a float", "Counter('float32', True)", {}),
        ("counts examples, an integer, full batches", "Counter('int32', True)", {"examples": EVEN}),
        ("a moving mean of the batches", "Centering()", {}),
        ("a moving mean of the batches, full batches", "Centering()", {"examples": EVEN}),
        # Of x, which tanh does not hold below 1.
        ("the largest value so far", "Largest()", {"layers": ("Largest()", "Dense(2)")}),
        (
            "SpectralNormalization(), uneven",
            "SpectralNormalization(Dense(3))",
            {"examples": UNEVEN},
        ),
    )
)

MODELS = tuple(
    _of(name, **{"group": "models", "layers": ("Dense(4, 'tanh')", "Dense(2)")} | kwargs)  # type: ignore[arg-type]
    for name, kwargs in {
        "Sequential": {"model": "sequential"},
        "Sequential without Input": {"model": "unbuilt"},
        "functional, two inputs": {
            "layers": ("Join()", "Dense(3, 'tanh')", "Dense(2)"),
            "x": "two inputs",
        },
        "functional, two outputs": {
            "layers": ("Dense(4, 'tanh')", "Heads()"),
            "y": "two outputs",
            "metrics": "",
            "compiled": {"run_eagerly": "True"},
        },
        "a layer that is not trained": {
            "layers": ("Dense(4, 'tanh', trainable=False)", "Dense(2)")
        },
    }.items()
)

CASES = (*KERAS, *MASKS, *NORMALISING, *RANDOM, *STATES, *MODELS)
