"""Sequence to sequence learning for performing number addition (keras.io, shortened)."""
import keras
from keras import layers
import numpy as np

TRAINING_SIZE = 400
DIGITS = 2
MAXLEN = DIGITS + 1 + DIGITS
chars = "0123456789+ "


class CharacterTable:
    def __init__(self, chars):
        self.chars = sorted(set(chars))
        self.char_indices = dict((c, i) for i, c in enumerate(self.chars))
        self.indices_char = dict((i, c) for i, c in enumerate(self.chars))

    def encode(self, C, num_rows):
        x = np.zeros((num_rows, len(self.chars)))
        for i, c in enumerate(C):
            x[i, self.char_indices[c]] = 1
        return x

    def decode(self, x, calc_argmax=True):
        if calc_argmax:
            x = x.argmax(axis=-1)
        return "".join(self.indices_char[x] for x in x)


ctable = CharacterTable(chars)
questions, expected = [], []
print("Generating data...")
for _ in range(TRAINING_SIZE):
    a, b = np.random.randint(0, 100, 2)
    q = "{}+{}".format(a, b)
    questions.append((q + " " * (MAXLEN - len(q)))[::-1])
    expected.append(str(a + b).ljust(DIGITS + 1))

x = np.array([ctable.encode(q, MAXLEN) for q in questions])
y = np.array([ctable.encode(e, DIGITS + 1) for e in expected])
indices = np.arange(len(y))
np.random.shuffle(indices)
x, y = x[indices], y[indices]
split_at = len(x) - len(x) // 10
(x_train, x_val), (y_train, y_val) = (x[:split_at], x[split_at:]), (y[:split_at], y[split_at:])

model = keras.Sequential()
model.add(layers.Input((MAXLEN, len(chars))))
model.add(layers.LSTM(24))
model.add(layers.RepeatVector(DIGITS + 1))
model.add(layers.LSTM(24, return_sequences=True))
model.add(layers.Dense(len(chars), activation="softmax"))
model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])

for epoch in range(1, 4):
    print("Iteration", epoch)
    model.fit(x_train, y_train, batch_size=32, epochs=1, validation_data=(x_val, y_val), verbose=2)
    for i in range(3):
        ind = np.random.randint(0, len(x_val))
        rowx, rowy = x_val[np.array([ind])], y_val[np.array([ind])]
        preds = np.argmax(model.predict(rowx, verbose=0), axis=-1)
        q, correct = ctable.decode(rowx[0]), ctable.decode(rowy[0])
        guess = ctable.decode(preds[0], calc_argmax=False)
        print("Q", q[::-1], "T", correct, "☑ " if correct == guess else "☒ ", guess)
