# Machine translation with a seq2seq GRU: reverse "words"
import json
import numpy as np
from tensorflow import keras
from tensorflow.keras.layers import Input, GRU, Dense, Embedding
from tensorflow.keras.models import Model

keras.utils.set_random_seed(99)
PAD, START, END = 0, 1, 2
vocab = 14
pairs = 256
T = 6

src = np.zeros((pairs, T), dtype="int32")
dec_in = np.zeros((pairs, T + 1), dtype="int32")
dec_out = np.zeros((pairs, T + 1), dtype="int32")
for k in range(pairs):
    n = np.random.randint(3, T + 1)
    w = np.random.randint(3, vocab, n)
    src[k, :n] = w
    dec_in[k, 0] = START
    dec_in[k, 1:n + 1] = w[::-1]
    dec_out[k, :n] = w[::-1]
    dec_out[k, n] = END

latent = 24
encoder_inputs = Input(shape=(None,), name="enc")
e = Embedding(vocab, 12, mask_zero=True)(encoder_inputs)
_, state = GRU(latent, return_state=True)(e)
decoder_inputs = Input(shape=(None,), name="dec")
dec_emb_layer = Embedding(vocab, 12)
decoder_gru = GRU(latent, return_sequences=True, return_state=True)
decoder_dense = Dense(vocab, activation="softmax")
d, _ = decoder_gru(dec_emb_layer(decoder_inputs), initial_state=state)
model = Model([encoder_inputs, decoder_inputs], decoder_dense(d))

model.compile(optimizer=keras.optimizers.RMSprop(0.01), loss="sparse_categorical_crossentropy",
              metrics=["accuracy"])
hist = model.fit([src, dec_in], dec_out, sample_weight=(dec_out > 0).astype("float32"),
                 batch_size=32, epochs=2, validation_split=0.2, verbose=2)
model.save("s2s_model.keras")

# inference models
encoder_model = Model(encoder_inputs, state)
st_in = Input(shape=(latent,))
o, s = decoder_gru(dec_emb_layer(decoder_inputs), initial_state=st_in)
decoder_model = Model([decoder_inputs, st_in], [decoder_dense(o), s])


def decode_sequence(seq):
    st = encoder_model.predict(seq, verbose=0)
    tok, out = START, []
    while len(out) < T:
        probs, st = decoder_model.predict([np.array([[tok]]), st], verbose=0)
        tok = int(probs[0, -1].argmax())
        if tok == END:
            break
        out.append(tok)
    return out


for k in range(2):
    print("-")
    print("Input sentence:", src[k].tolist())
    print("Decoded sentence:", decode_sequence(src[k:k + 1]))
json.dump(hist.history, open("s2s_history.json", "w"))
