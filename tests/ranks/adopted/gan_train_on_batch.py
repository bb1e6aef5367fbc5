# "Keras-GAN" style GAN
from tensorflow.keras.layers import Input, Dense, Reshape, Flatten, LeakyReLU
from tensorflow.keras.models import Sequential, Model
from tensorflow.keras.optimizers import Adam
import tensorflow as tf
from sklearn.datasets import load_digits
import matplotlib
matplotlib.use('Agg')
import matplotlib.pyplot as plt
import os
import numpy as np

tf.keras.utils.set_random_seed(12)

class GAN():
    def __init__(self):
        self.img_shape = (8, 8, 1)
        self.latent_dim = 10
        self.discriminator = self.build_discriminator()
        self.discriminator.compile(loss='binary_crossentropy', optimizer=Adam(0.0002, 0.5), metrics=['accuracy'])
        self.generator = self.build_generator()
        z = Input(shape=(self.latent_dim,))
        img = self.generator(z)
        # For the combined model we will only train the generator
        self.discriminator.trainable = False
        validity = self.discriminator(img)
        self.combined = Model(z, validity)
        self.combined.compile(loss='binary_crossentropy', optimizer=Adam(0.0002, 0.5))

    def build_generator(self):
        return Sequential([Input((self.latent_dim,)), Dense(32), LeakyReLU(0.2),
                           Dense(64, activation='tanh'), Reshape(self.img_shape)])

    def build_discriminator(self):
        return Sequential([Input(self.img_shape), Flatten(), Dense(32), LeakyReLU(0.2), Dense(1, activation='sigmoid')])

    def train(self, epochs, batch_size=32, sample_interval=10):
        X_train = load_digits().images[:500, :, :, None] / 8. - 1.
        valid = np.ones((batch_size, 1))
        fake = np.zeros((batch_size, 1))
        for epoch in range(epochs):
            idx = np.random.randint(0, X_train.shape[0], batch_size)
            imgs = X_train[idx]
            noise = np.random.normal(0, 1, (batch_size, self.latent_dim))
            gen_imgs = self.generator.predict(noise, verbose=0)
            self.discriminator.trainable = True
            d_loss_real = self.discriminator.train_on_batch(imgs, valid)
            d_loss_fake = self.discriminator.train_on_batch(gen_imgs, fake)
            d_loss = 0.5 * np.add(d_loss_real, d_loss_fake)
            self.discriminator.trainable = False
            noise = np.random.normal(0, 1, (batch_size, self.latent_dim))
            g_loss = self.combined.train_on_batch(noise, valid)
            if epoch % sample_interval == 0:
                print("%d [D loss: %f, acc.: %.2f%%] [G loss: %f]" % (epoch, d_loss[0], 100 * d_loss[1], g_loss))
                self.sample_images(epoch)

    def sample_images(self, epoch):
        gen_imgs = self.generator.predict(np.random.normal(0, 1, (4, self.latent_dim)), verbose=0)
        fig, axs = plt.subplots(2, 2)
        for a, g in zip(axs.ravel(), gen_imgs):
            a.imshow(g[:, :, 0], cmap='gray')
            a.axis('off')
        os.makedirs("images", exist_ok=True)
        fig.savefig("images/%d.png" % epoch)
        plt.close()

if __name__ == '__main__':
    gan = GAN()
    gan.train(epochs=21, batch_size=32, sample_interval=10)
    gan.generator.save_weights("generator.weights.h5")
