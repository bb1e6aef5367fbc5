"""All optimizers of Keras and their options, on dense and on sparse gradients."""

from __future__ import annotations

from exactness.case import IDLE, UNEVEN, Case

WORDS = ("Embedding(10, 4)", "GlobalAveragePooling1D()", "Dense(2)")


def _optimizers(group: str, *texts: str, **kwargs: object) -> list[Case]:
    # Deeper than one layer, so that no gradient is simple.
    return [Case(group, text, optimizer=text, **kwargs) for text in texts]  # type: ignore[arg-type]


ALL = (
    "SGD(0.1)", "SGD(0.1, momentum=0.9, nesterov=True)", "Adam(0.01)", "Adam(0.01, amsgrad=True)", "AdamW(0.01)",
    "Adamax(0.01)", "Nadam(0.01)", "Adadelta(1.0)", "Adagrad(0.1)", "Adafactor(0.01)", "RMSprop(0.01)",
    "RMSprop(0.01, centered=True, momentum=0.5)", "Ftrl(0.1)", "Lion(0.01)", "Lamb(0.01)", "Muon(0.01)",
)  # fmt: skip
CLIPPED = (
    "SGD(0.1, clipnorm=0.1)", "SGD(0.1, clipvalue=0.05)", "SGD(0.1, global_clipnorm=0.1)",
    "Adam(0.01, clipnorm=0.1)", "Adam(0.01, global_clipnorm=0.1)",
)  # fmt: skip
OPTIONS = (
    "SGD(0.1, weight_decay=0.1)", "Adam(0.01, weight_decay=0.1)",
    "SGD(0.1, use_ema=True, ema_momentum=0.8)", "SGD(0.1, use_ema=True, ema_overwrite_frequency=3)",
    "SGD(0.1, gradient_accumulation_steps=2)", "SGD(0.1, momentum=0.9, gradient_accumulation_steps=3)",
    "Adam(0.01, gradient_accumulation_steps=2, clipnorm=0.1)", "SGD(0.1, loss_scale_factor=64.0)",
    "LossScaleOptimizer(SGD(0.1, momentum=0.9))",
    "SGD(schedules.ExponentialDecay(0.1, 2, 0.5))", "SGD(schedules.CosineDecay(0.1, 6))",
    "SGD(schedules.PiecewiseConstantDecay([2, 5], [0.1, 0.05, 0.01]))",
    "Adam(schedules.CosineDecayRestarts(0.01, 3))",
)  # fmt: skip
SPARSE = (
    "SGD(0.1, momentum=0.9)", "Adam(0.01)", "AdamW(0.01)", "Adagrad(0.1)", "RMSprop(0.01)", "Ftrl(0.1)", "Lamb(0.01)",
    "SGD(0.1, clipnorm=0.05)", "SGD(0.1, gradient_accumulation_steps=2)",
)  # fmt: skip

CASES = (
    *_optimizers("optimizers", *ALL),
    # Keras's fit starts it anew in every step of a graph that builds it; eagerly it does not.
    *_optimizers("optimizers", "ScheduleFreeAdamW(0.01)", compiled={"run_eagerly": "True"}),
    *_optimizers("optimizers: clipping", *CLIPPED, examples=UNEVEN),
    *_optimizers("optimizers: options", *OPTIONS),
    *_optimizers("optimizers: sparse gradients", *SPARSE, layers=WORDS, x="words", examples=IDLE),
)
