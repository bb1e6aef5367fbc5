import random
from collections import deque
import numpy as np
from tensorflow import keras
from tensorflow.keras.models import Sequential
from tensorflow.keras.layers import Dense, Input
keras.utils.set_random_seed(1)
SIZE = 4

class Grid:
    moves = [(0, 1), (0, -1), (1, 0), (-1, 0)]

    def reset(self):
        self.p = [0, 0]
        return self.state()

    def state(self):
        s = np.zeros((1, SIZE * SIZE))
        s[0, self.p[0] * SIZE + self.p[1]] = 1
        return s

    def step(self, a):
        dx, dy = self.moves[a]
        self.p = [min(max(self.p[0] + dx, 0), SIZE - 1), min(max(self.p[1] + dy, 0), SIZE - 1)]
        done = self.p == [SIZE - 1, SIZE - 1]
        return self.state(), 1.0 if done else -0.1, done

class DQNAgent:
    def __init__(self):
        self.memory = deque(maxlen=500)
        self.gamma, self.epsilon = 0.9, 1.0
        self.model = self._build_model()
        self.target_model = self._build_model()
        self.target_model.set_weights(self.model.get_weights())

    def _build_model(self):
        model = Sequential([Input((SIZE * SIZE,)), Dense(16, activation="relu"), Dense(4, activation="linear")])
        model.compile(loss="mse", optimizer=keras.optimizers.Adam(learning_rate=0.01))
        return model

    def act(self, state):
        if np.random.rand() <= self.epsilon:
            return random.randrange(4)
        return int(np.argmax(self.model(state)[0]))

    def replay(self, batch_size):
        batch = random.sample(self.memory, batch_size)
        s = np.vstack([b[0] for b in batch])
        s2 = np.vstack([b[3] for b in batch])
        target = np.array(self.model(s))
        nxt = np.array(self.target_model(s2)).max(axis=1)
        for i, (_, a, r, _, done) in enumerate(batch):
            target[i, a] = r if done else r + self.gamma * nxt[i]
        return self.model.train_on_batch(s, target)

agent, env = DQNAgent(), Grid()
for e in range(8):
    state, total = env.reset(), 0
    for t in range(15):
        a = agent.act(state)
        nxt, reward, done = env.step(a)
        agent.memory.append((state, a, reward, nxt, done))
        state, total = nxt, total + reward
        loss = agent.replay(16) if len(agent.memory) > 16 else float("nan")
        if done:
            break
    agent.epsilon = max(0.1, agent.epsilon * 0.8)
    agent.target_model.set_weights(agent.model.get_weights())
    print("episode: {}/8, score: {:.1f}, e: {:.2f}, loss: {:.4f}".format(e, total, agent.epsilon, float(loss)))
agent.model.save_weights("dqn.weights.h5")
