# fit a curve where the measurement errors differ: weight every point by 1/sigma^2
import numpy as np
import matplotlib
matplotlib.use('Agg')
import matplotlib.pyplot as plt
import keras

keras.utils.set_random_seed(31415)

n = 257
t = np.sort(np.random.uniform(-3, 3, n))
sigma = 0.05 + 0.5 * np.random.rand(n)
f = np.sin(2 * t) + 0.3 * t + sigma * np.random.randn(n)
w = 1 / sigma**2
w = w / w.mean()

xx = t[:, None]
perm = np.random.permutation(n)
tr, va = perm[:200], perm[200:]

m = keras.Sequential([
    keras.layers.Input((1,)),
    keras.layers.Dense(24, 'tanh'),
    keras.layers.Dense(24, 'tanh'),
    keras.layers.Dense(1),
])
m.compile(keras.optimizers.Adam(0.02), loss='mse', weighted_metrics=['mae'])
h = m.fit(xx[tr], f[tr], sample_weight=w[tr],
          validation_data=(xx[va], f[va], w[va]),
          epochs=3, batch_size=20, verbose=0)

for k, v in h.history.items():
    print(f'{k:>20s}: ', ' '.join('%.4f' % a for a in v))

chi2 = np.mean(((m.predict(xx, verbose=0)[:, 0] - f) / sigma) ** 2)
print('chi2/n =', chi2)

plt.errorbar(t, f, yerr=sigma, fmt='.', alpha=0.3)
plt.plot(t, m.predict(xx, verbose=0), 'r')
plt.title('weighted fit, chi2/n = %.2f' % chi2)
plt.savefig('fit.pdf')
np.savetxt('fit.txt', np.c_[t, m.predict(xx, verbose=0)])
