import keras
import tensorflow as tf
from keras import layers
import numpy as np
from sklearn.datasets import load_digits

keras.utils.set_random_seed(5)


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.teacher = teacher
        self.student = student

    def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.1, temperature=3):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def train_step(self, data):
        x, y = data
        teacher_predictions = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            student_predictions = self.student(x, training=True)
            student_loss = self.student_loss_fn(y, student_predictions)
            distillation_loss = self.distillation_loss_fn(
                tf.nn.softmax(teacher_predictions / self.temperature, axis=1),
                tf.nn.softmax(student_predictions / self.temperature, axis=1)) * self.temperature**2
            loss = self.alpha * student_loss + (1 - self.alpha) * distillation_loss
        trainable_vars = self.student.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply_gradients(zip(gradients, trainable_vars))
        for metric in self.metrics:
            if metric.name != "loss":
                metric.update_state(y, student_predictions)
        results = {m.name: m.result() for m in self.metrics if m.name != "loss"}
        results.update({"student_loss": student_loss, "distillation_loss": distillation_loss})
        return results

    def call(self, x):
        return self.student(x)


def net(w, name):
    return keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(w, 3, activation="relu"), layers.Flatten(),
                             layers.Dense(10)], name=name)


x, y = load_digits().images[..., None].astype("float32") / 16, load_digits().target
x_train, y_train, x_test, y_test = x[:480], y[:480], x[480:700], y[480:700]
ce = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

teacher = net(16, "teacher")
teacher.compile("adam", ce, metrics=["accuracy"])
teacher.fit(x_train, y_train, epochs=3, verbose=2)
teacher.evaluate(x_test, y_test, verbose=2)

student = net(2, "student")
student_scratch = keras.models.clone_model(student)
distiller = Distiller(student=student, teacher=teacher)
distiller.compile(keras.optimizers.Adam(), [keras.metrics.SparseCategoricalAccuracy()], ce, keras.losses.KLDivergence(), alpha=0.1, temperature=10)
distiller.fit(x_train, y_train, epochs=2, verbose=2)
print("distilled:", np.mean(student.predict(x_test, verbose=0).argmax(1) == y_test))

student_scratch.compile("adam", ce, metrics=["accuracy"])
student_scratch.fit(x_train, y_train, epochs=2, verbose=2)
print("from scratch:", student_scratch.evaluate(x_test, y_test, verbose=0)[1])
