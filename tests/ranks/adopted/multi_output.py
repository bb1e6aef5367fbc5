import numpy as np
import tensorflow as tf
from tensorflow.keras.layers import Input, Dense, Concatenate
from tensorflow.keras.models import Model
from sklearn.datasets import load_wine

tf.keras.utils.set_random_seed(100)

wine = load_wine()
X = (wine.data - wine.data.mean(0)) / wine.data.std(0)
proline = X[:, -1:]
alcohol = X[:, :1]
features = X[:, 1:-1]
p = np.random.permutation(len(X))
features, alcohol, proline, cls = features[p], alcohol[p], proline[p], wine.target[p]

# 3 heads: two regressions and a classification
inp = Input(shape=(features.shape[1],), name='features')
h = Dense(24, activation='relu', name='trunk')(inp)
out_a = Dense(1, name='alcohol')(h)
out_p = Dense(1, name='proline')(h)
out_c = Dense(3, activation='softmax', name='cultivar')(Concatenate()([h, out_a, out_p]))
model = Model(inputs=inp, outputs={'alcohol': out_a, 'proline': out_p, 'cultivar': out_c})

model.compile(
    optimizer=tf.keras.optimizers.Nadam(0.01),
    loss={'alcohol': 'mse', 'proline': tf.keras.losses.Huber(delta=0.5), 'cultivar': 'sparse_categorical_crossentropy'},
    loss_weights={'alcohol': 0.5, 'proline': 0.5, 'cultivar': 1.0},
    metrics={'alcohol': ['mae'], 'proline': ['mae'], 'cultivar': ['accuracy']},
)

n_tr = 140
h = model.fit(
    {'features': features[:n_tr]},
    {'alcohol': alcohol[:n_tr], 'proline': proline[:n_tr], 'cultivar': cls[:n_tr]},
    validation_data=({'features': features[n_tr:]},
                     {'alcohol': alcohol[n_tr:], 'proline': proline[n_tr:], 'cultivar': cls[n_tr:]}),
    epochs=3, batch_size=20, verbose=2)

ev = model.evaluate({'features': features[n_tr:]},
                    {'alcohol': alcohol[n_tr:], 'proline': proline[n_tr:], 'cultivar': cls[n_tr:]},
                    return_dict=True, verbose=0)
for name, value in sorted(ev.items()):
    print('%-30s %.4f' % (name, value))
pred = model.predict(features[n_tr:n_tr + 3], verbose=0)
print({k: v.round(2).tolist() for k, v in pred.items()})
model.save('wine_heads.keras')
