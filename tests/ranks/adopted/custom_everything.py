"""Own layer, own loss, own metric, own regularizer and own initializer in one model."""
import keras
import numpy as np
from keras import ops
from sklearn.datasets import load_diabetes

keras.utils.set_random_seed(9)

@keras.saving.register_keras_serializable(package="mine")
class LinearScaled(keras.layers.Layer):
    def __init__(self, units, l1=1e-4, **kw):
        super().__init__(**kw)
        self.units, self.l1 = units, l1

    def build(self, input_shape):
        self.w = self.add_weight(shape=(input_shape[-1], self.units), initializer="he_normal",
                                 regularizer=L1Off(self.l1), name="w")
        self.b = self.add_weight(shape=(self.units,), initializer="zeros", name="b")
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return self.scale * ops.matmul(x, self.w) + self.b

    def get_config(self):
        return {**super().get_config(), "units": self.units, "l1": self.l1}

@keras.saving.register_keras_serializable(package="mine")
class L1Off(keras.regularizers.Regularizer):
    def __init__(self, strength=1e-3):
        self.strength = strength

    def __call__(self, w):
        return self.strength * ops.sum(ops.abs(w))

    def get_config(self):
        return {"strength": self.strength}

@keras.saving.register_keras_serializable(package="mine")
def log_cosh_plus(y_true, y_pred):
    d = y_pred - y_true
    return ops.mean(d + ops.softplus(-2.0 * d) - np.log(2.0), axis=-1)

@keras.saving.register_keras_serializable(package="mine")
class R2(keras.metrics.Metric):
    def __init__(self, name="r2", **kw):
        super().__init__(name=name, **kw)
        self.sse = self.add_variable((), "zeros", name="sse")
        self.sy = self.add_variable((), "zeros", name="sy")
        self.syy = self.add_variable((), "zeros", name="syy")
        self.n = self.add_variable((), "zeros", name="n")

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_true = ops.reshape(ops.cast(y_true, "float32"), (-1, 1))
        self.sse.assign_add(ops.sum(ops.square(y_true - y_pred)))
        self.sy.assign_add(ops.sum(y_true))
        self.syy.assign_add(ops.sum(ops.square(y_true)))
        self.n.assign_add(ops.cast(ops.shape(y_true)[0], "float32"))

    def result(self):
        return 1.0 - self.sse / (self.syy - ops.square(self.sy) / self.n + 1e-7)

x, y = load_diabetes(return_X_y=True, scaled=True)
x, y = x * 20, (y - y.mean()) / y.std()
model = keras.Sequential([keras.Input((10,)), LinearScaled(16), keras.layers.ELU(), LinearScaled(1)])
model.compile(keras.optimizers.Adam(0.01), loss=log_cosh_plus, metrics=[R2()])
model.fit(x[:352], y[:352, None], batch_size=32, epochs=3, validation_data=(x[352:], y[352:, None]), verbose=2)
model.save("custom.keras")
again = keras.models.load_model("custom.keras")
print("reloaded:", again.evaluate(x[352:], y[352:, None], verbose=0))
