"""Tiny GRU language model with an explicit loop, global-norm clipping and LR decay."""
import json
import logging
import math
import os
import sys

import numpy as np
import tensorflow as tf
from tensorflow import keras

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
log = logging.getLogger("lm")

CONFIG = dict(vocab=20, seq=12, hidden=24, batch=16, epochs=2, lr=0.02, clip=1.0, seed=7)

def corpus(cfg):
    rng = np.random.RandomState(cfg["seed"])
    trans = rng.dirichlet(np.ones(cfg["vocab"]) * 0.1, size=cfg["vocab"])
    toks = [0]
    for _ in range(256 * cfg["seq"]):
        toks.append(rng.choice(cfg["vocab"], p=trans[toks[-1]]))
    return np.array(toks)

class LanguageModel(keras.Model):
    def __init__(self, cfg):
        super().__init__()
        self.emb = keras.layers.Embedding(cfg["vocab"], 16)
        self.rnn = keras.layers.GRU(cfg["hidden"], return_sequences=True)
        self.out = keras.layers.Dense(cfg["vocab"])

    def call(self, x):
        return self.out(self.rnn(self.emb(x)))

def run(cfg):
    keras.utils.set_random_seed(cfg["seed"])
    toks = corpus(cfg)
    n = (len(toks) - 1) // cfg["seq"] * cfg["seq"]
    x, y = toks[:n].reshape(-1, cfg["seq"]), toks[1:n + 1].reshape(-1, cfg["seq"])
    train = tf.data.Dataset.from_tensor_slices((x[:224], y[:224])).batch(cfg["batch"])
    valid = tf.data.Dataset.from_tensor_slices((x[224:], y[224:])).batch(cfg["batch"])
    model = LanguageModel(cfg)
    lr = keras.optimizers.schedules.ExponentialDecay(cfg["lr"], 14, 0.5)
    opt = keras.optimizers.Adam(lr)
    ce = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(xb, yb):
        with tf.GradientTape() as tape:
            loss = ce(yb, model(xb))
        g, norm = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), cfg["clip"])
        opt.apply_gradients(zip(g, model.trainable_variables))
        return loss, norm

    history = []
    for epoch in range(cfg["epochs"]):
        losses = [float(step(xb, yb)[0]) for xb, yb in train]
        val = np.mean([float(ce(yb, model(xb))) for xb, yb in valid])
        log.info("epoch %d train ppl %.2f valid ppl %.2f", epoch, math.exp(np.mean(losses)), math.exp(val))
        history.append({"train": float(np.mean(losses)), "valid": float(val)})
    os.makedirs("runs/lm", exist_ok=True)
    with open("runs/lm/history.json", "w") as f:
        json.dump({"config": cfg, "history": history}, f)
    return 0

if __name__ == "__main__":
    sys.exit(run(CONFIG))
