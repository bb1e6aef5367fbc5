# %% [markdown]
# # Wine classification 🍷 (please upvote if you find it useful!)

# %% [code]
import numpy as np # linear algebra
import pandas as pd # data processing, CSV file I/O (e.g. pd.read_csv)
import os
import warnings
warnings.filterwarnings('ignore')
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import LabelEncoder, StandardScaler
import matplotlib.pyplot as plt
from tensorflow.keras import *
from tensorflow.keras.layers import *
from tensorflow.keras.callbacks import *
utils.set_random_seed(2021)

# %% [code]
raw = load_wine(as_frame=True).frame
raw['target'] = raw['target'].map({0: 'barolo', 1: 'grignolino', 2: 'barbera'})
os.makedirs('input', exist_ok=True)
raw.to_csv('input/wine.csv', index=False)
for dirname, _, filenames in os.walk('input'):
    for filename in filenames:
        print(os.path.join(dirname, filename))

# %% [code]
df = pd.read_csv('input/wine.csv')
print(df.describe().T[['mean', 'std']])
print(df.target.value_counts())

# %% [code]
X = StandardScaler().fit_transform(df.drop('target', axis=1))
y = LabelEncoder().fit_transform(df['target'])
X_train, X_valid, y_train, y_valid = train_test_split(X, y, stratify=y, test_size=0.25, random_state=0)

# %% [code]
model = Sequential([
    Input(shape=(X.shape[1],)),
    Dense(32, activation='selu', kernel_initializer='lecun_normal'),
    BatchNormalization(),
    Dense(16, activation='selu', kernel_initializer='lecun_normal'),
    Dense(3, activation='softmax'),
])
model.compile(optimizer='adam', loss='sparse_categorical_crossentropy', metrics=['accuracy'])

es = EarlyStopping(monitor='val_loss', patience=2, restore_best_weights=True)
rlr = ReduceLROnPlateau(monitor='val_loss', factor=0.5, patience=1, verbose=1)
history = model.fit(X_train, y_train, validation_data=(X_valid, y_valid), epochs=3, batch_size=16, callbacks=[es, rlr])

# %% [code]
pd.DataFrame(history.history)[['loss', 'val_loss']].plot(figsize=(5, 3))
plt.savefig('history.png')
plt.show()
sub = pd.DataFrame({'id': np.arange(len(X_valid)), 'target': model.predict(X_valid).argmax(1)})
sub.to_csv('submission.csv', index=False)
print(sub.head())
print('valid accuracy', (sub.target.values == y_valid).mean())
