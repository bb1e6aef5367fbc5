"""Actor Critic on a self-made corridor environment (no gym needed)."""
import numpy as np
import tensorflow as tf
import keras
from keras import layers

seed = 42
gamma = 0.99
max_steps_per_episode = 25
np.random.seed(seed)
tf.random.set_seed(seed)

class Corridor:
    def reset(self):
        self.pos = 2
        return self._obs()

    def _obs(self):
        o = np.zeros(7, dtype="float32")
        o[self.pos] = 1
        return o

    def step(self, a):
        self.pos += 1 if a == 1 else -1
        done = self.pos in (0, 6)
        return self._obs(), (1.0 if self.pos == 6 else -0.05), done

env = Corridor()
eps = np.finfo(np.float32).eps.item()
inputs = layers.Input(shape=(7,))
common = layers.Dense(16, activation="relu")(inputs)
action = layers.Dense(2, activation="softmax")(common)
critic = layers.Dense(1)(common)
model = keras.Model(inputs=inputs, outputs=[action, critic])

optimizer = keras.optimizers.Adam(learning_rate=0.01)
huber_loss = keras.losses.Huber()
running_reward = 0
for episode_count in range(12):
    state = env.reset()
    episode_reward = 0
    probs_h, values_h, rewards_h = [], [], []
    with tf.GradientTape() as tape:
        for timestep in range(1, max_steps_per_episode):
            action_probs, critic_value = model(tf.expand_dims(state, 0))
            values_h.append(critic_value[0, 0])
            a = np.random.choice(2, p=np.squeeze(action_probs) / np.sum(action_probs))
            probs_h.append(tf.math.log(action_probs[0, a]))
            state, reward, done = env.step(a)
            rewards_h.append(reward)
            episode_reward += reward
            if done:
                break
        running_reward = 0.05 * episode_reward + (1 - 0.05) * running_reward
        returns, discounted_sum = [], 0
        for r in rewards_h[::-1]:
            discounted_sum = r + gamma * discounted_sum
            returns.insert(0, discounted_sum)
        returns = np.array(returns)
        returns = ((returns - np.mean(returns)) / (np.std(returns) + eps)).tolist()
        actor_losses, critic_losses = [], []
        for log_prob, value, ret in zip(probs_h, values_h, returns):
            actor_losses.append(-log_prob * (ret - value))
            critic_losses.append(huber_loss(tf.expand_dims(value, 0), tf.expand_dims(ret, 0)))
        loss_value = sum(actor_losses) + sum(critic_losses)
    grads = tape.gradient(loss_value, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    if episode_count % 4 == 0:
        print("running reward: {:.2f} at episode {}".format(running_reward, episode_count))
print("final running reward %.3f" % running_reward)
