'''
# Example script to generate text from a (very short) corpus.
'''
from tensorflow.keras.callbacks import LambdaCallback
from tensorflow.keras.models import Sequential
from tensorflow.keras.layers import Dense, LSTM, Input
from tensorflow.keras.optimizers import RMSprop
import numpy as np
import random
import sys
import io

with io.open('corpus.txt', 'w', encoding='utf-8') as f:
    f.write("supposing that truth is a woman - what then? is there not ground for suspecting that "
            "all philosophers, in so far as they have been dogmatists, have failed to understand "
            "women, that the terrible seriousness and clumsy importunity with which they have usually "
            "paid their addresses to truth, have been unskilled and unseemly methods? " * 3)
with io.open('corpus.txt', encoding='utf-8') as f:
    text = f.read().lower()
print('corpus length:', len(text))

chars = sorted(list(set(text)))
print('total chars:', len(chars))
char_indices = dict((c, i) for i, c in enumerate(chars))
indices_char = dict((i, c) for i, c in enumerate(chars))

maxlen = 20
step = 3
sentences = []
next_chars = []
for i in range(0, len(text) - maxlen, step):
    sentences.append(text[i: i + maxlen])
    next_chars.append(text[i + maxlen])
print('nb sequences:', len(sentences))

x = np.zeros((len(sentences), maxlen, len(chars)), dtype=np.bool_)
y = np.zeros((len(sentences), len(chars)), dtype=np.bool_)
for i, sentence in enumerate(sentences):
    for t, char in enumerate(sentence):
        x[i, t, char_indices[char]] = 1
    y[i, char_indices[next_chars[i]]] = 1

model = Sequential([Input((maxlen, len(chars))), LSTM(24), Dense(len(chars), activation='softmax')])
model.compile(loss='categorical_crossentropy', optimizer=RMSprop(learning_rate=0.01))

def sample(preds, temperature=1.0):
    preds = np.asarray(preds).astype('float64')
    preds = np.log(preds + 1e-9) / temperature
    exp_preds = np.exp(preds)
    preds = exp_preds / np.sum(exp_preds)
    return np.argmax(np.random.multinomial(1, preds, 1))

def on_epoch_end(epoch, _):
    print('\n----- Generating text after Epoch: %d' % epoch)
    start_index = random.randint(0, len(text) - maxlen - 1)
    for diversity in [0.5, 1.0]:
        print('----- diversity:', diversity)
        sentence = text[start_index: start_index + maxlen]
        for i in range(12):
            x_pred = np.zeros((1, maxlen, len(chars)))
            for t, char in enumerate(sentence):
                x_pred[0, t, char_indices[char]] = 1.
            next_char = indices_char[sample(model.predict(x_pred, verbose=0)[0], diversity)]
            sentence = sentence[1:] + next_char
            sys.stdout.write(next_char)
        print()

model.fit(x, y, batch_size=32, epochs=2, callbacks=[LambdaCallback(on_epoch_end=on_epoch_end)], verbose=2)
