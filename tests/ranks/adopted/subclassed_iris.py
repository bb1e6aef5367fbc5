import tensorflow as tf
from tensorflow.keras import Model, layers
import numpy as np
from sklearn import datasets
from sklearn.model_selection import train_test_split
from sklearn.metrics import accuracy_score, confusion_matrix

tf.keras.utils.set_random_seed(11)


class IrisClassifier(Model):

    def __init__(self, num_classes, hidden=(16, 8), **kwargs):
        super(IrisClassifier, self).__init__(**kwargs)
        self.hidden_layers = [layers.Dense(h, activation='relu') for h in hidden]
        self.bn = layers.BatchNormalization()
        self.classifier = layers.Dense(num_classes)

    def call(self, inputs, training=False):
        x = inputs
        for layer in self.hidden_layers:
            x = layer(x)
        x = self.bn(x, training=training)
        return self.classifier(x)


iris = datasets.load_iris()
x_train, x_test, y_train, y_test = train_test_split(
    iris.data.astype(np.float32), iris.target, test_size=0.3, random_state=11)

model = IrisClassifier(3)
model.compile(
    optimizer=tf.keras.optimizers.Adam(learning_rate=0.02),
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=['accuracy'])

model.fit(x_train, y_train, epochs=3, batch_size=8, validation_split=0.1)
model.summary()

y_hat = tf.argmax(model.predict(x_test), axis=-1).numpy()
print('accuracy', accuracy_score(y_test, y_hat))
print(confusion_matrix(y_test, y_hat))
