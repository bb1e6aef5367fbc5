"""What is around the steps: validation, callbacks, precision, compilation."""

from __future__ import annotations

from exactness.case import EVEN, Case


def _fit(name: str, compiled: dict[str, str] | None = None, **fit: str) -> Case:
    return Case("fit", name, compiled=compiled or {}, fit=fit)


def _callback(text: str, **kwargs: object) -> Case:
    return Case("callbacks", text, **{"fit": {"callbacks": f"[{text}]", "epochs": "4"}} | kwargs)  # type: ignore[arg-type]


FIT = (
    _fit("validation_data", validation_data="True"),
    _fit("validation_split", validation_split="0.3"),
    _fit("validation_freq=[2]", validation_data="True", validation_freq="[2]"),
    _fit("validation_steps=1", validation_data="True", validation_steps="1"),
    _fit("initial_epoch=1", initial_epoch="1", epochs="3"),
    _fit("steps_per_epoch=2", steps_per_epoch="2"),
    _fit("steps_per_execution=2", {"steps_per_execution": "2"}),
    _fit("steps_per_execution=3", {"steps_per_execution": "3"}),
    _fit("run_eagerly=True", {"run_eagerly": "True"}),
    _fit("jit_compile=True", {"jit_compile": "True"}),
    _fit("weighted_metrics", {"weighted_metrics": "['mae', 'mse']"}),
    Case("fit", "evaluate and predict", answers=True),
    Case("fit", "evaluate and predict, full batches", examples=EVEN, answers=True),
    Case("fit", "evaluate and predict, weights", weights="of examples", answers=True,
         compiled={"weighted_metrics": "['mae']"}),
    Case("fit", "a nan in the data", x="vectors with a nan"),
)  # fmt: skip

CALLBACKS = (
    _callback("EarlyStopping('loss', patience=0, min_delta=0.3)"),
    _callback("EarlyStopping('loss', patience=0, min_delta=0.3, restore_best_weights=True)"),
    _callback("EarlyStopping('val_mae', patience=0, min_delta=0.1)",
              fit={"callbacks": "[EarlyStopping('val_mae', patience=0, min_delta=0.1)]", "epochs": "4",
                   "validation_data": "True"}),
    _callback("ReduceLROnPlateau('loss', factor=0.1, patience=1, min_delta=0.5)"),
    _callback("LearningRateScheduler(lambda epoch, rate: rate * 0.5)"),
    _callback("TerminateOnNaN()", x="vectors with a nan"),
    _callback("SwapEMAWeights(swap_on_epoch=True)", optimizer="SGD(0.1, use_ema=True, ema_momentum=0.8)"),
    _callback("LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(double=2 * logs['loss']))"),
    _callback("LambdaCallback(on_train_batch_end=lambda batch, logs: logs['loss'])"),
)  # fmt: skip

PRECISION = (
    Case("precision", "mixed_bfloat16", ("Dense(4, 'tanh')", "Dense(2, dtype='float32')"), policy="mixed_bfloat16"),
    Case("precision", "mixed_float16", ("Dense(4, 'tanh')", "Dense(2, dtype='float32')"), policy="mixed_float16"),
    Case("precision", "mixed_float16, Adam", ("Dense(4, 'tanh')", "Dense(2, dtype='float32')"),
         policy="mixed_float16", optimizer="Adam(0.01)"),
    Case("precision", "float64", policy="float64"),
    Case("precision", "mixed_float16, sum", ("Dense(4, 'tanh')", "Dense(2, dtype='float32')"), policy="mixed_float16",
         loss="MeanSquaredError(reduction='sum')", optimizer="SGD(0.02)"),
)  # fmt: skip

CASES = (*FIT, *CALLBACKS, *PRECISION)
